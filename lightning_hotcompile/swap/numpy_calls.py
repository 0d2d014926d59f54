"""What numpy computes in a step is computed by numpy, traced or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch._dynamo.config
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import NumpyVariable

_PURE = (np.prod, np.sum, np.mean, np.max, np.min, np.clip, np.round)
"""With numbers in and a number out, as are all ufuncs (``np.sqrt``) and types (``np.float32``)."""


class NumpyByNumpy:
    """Dynamo leaves numpy alone, at the price of a graph break; what has numbers only is a constant.

    It would stand in for numpy with torch operations. They draw random numbers from torch's generator, and
    where they are not quite like numpy's (``np.percentile`` gives an array for a number), code of the user's
    that is right raises, or is wrong.
    """

    def __init__(self) -> None:
        self._config = torch._dynamo.config.patch(trace_numpy=False)

    def __enter__(self) -> None:
        self._config.__enter__()
        self._prior = NumpyVariable.call_function
        NumpyVariable.call_function = _constants_first(self._prior)  # type: ignore[method-assign]

    def __exit__(self, *error: Any) -> None:
        NumpyVariable.call_function = self._prior  # type: ignore[method-assign]
        self._config.__exit__(*error)


def _constants_first(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = _number(self.value, args, kwargs)
        return call(self, tx, args, kwargs) if found is None else ConstantVariable.create(found)

    return call_function


def _number(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool | int | float | complex | None:
    """What a call comes to if it has to do with known numbers only."""
    if not _is_pure(function) or not all(v.is_python_constant() for v in (*args, *kwargs.values())):
        return None
    try:
        found = function(
            *[v.as_python_constant() for v in args],
            **{name: v.as_python_constant() for name, v in kwargs.items()},
        )
    except Exception:  # noqa: BLE001  # numpy itself raises it, in the user's frame
        return None
    found = found.item() if isinstance(found, np.generic) else found
    return found if isinstance(found, (bool, int, float, complex)) else None


def _is_pure(function: Any) -> bool:
    if isinstance(function, type):
        return issubclass(function, (np.number, np.bool_))
    return isinstance(function, np.ufunc) or any(function is known for known in _PURE)
