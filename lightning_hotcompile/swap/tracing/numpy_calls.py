"""What numpy computes in a step is computed by numpy, traced or not."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import numpy as np
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable

from lightning_hotcompile.swap.tracing.numpy_numbers import outcome
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_PLACES: tuple[tuple[Any, str], ...] = (
    (NumpyVariable, "call_function"),
    (NumpyNdarrayVariable, "call_method"),
)
"""Where Dynamo would begin to stand in for numpy: a call of a function, of a method."""

_PURE = (np.prod, np.sum, np.mean, np.max, np.min, np.clip, np.round)
"""With numbers in and a number out, as are all ufuncs (``np.sqrt``) and types (``np.float32``)."""


def overrides() -> list[Override]:
    """Dynamo leaves numpy alone, at the price of a graph break; what has numbers only is a number.

    It would stand in for numpy with torch operations. They draw random numbers from torch's generator, and
    where they are not quite like numpy's (``np.percentile`` gives an array for a number), code of the user's
    that is right raises, or is wrong. Arrays that come into a traced frame stay inputs of its graph, which
    is why ``trace_numpy`` is not switched off: they would be constants then.
    """

    def call(name: str, prior: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_pure = name == "call_function" and _is_pure(variable.value)
        found = outcome(variable.value, *args, **kwargs) if is_pure else None
        if found is None:
            _end_graph(name, variable)
        return found

    def method_of_tensor(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "numpy":
            _end_graph(name, variable)
        return prior(variable, tx, name, *args, **kwargs)

    places = [Override(owner, name, functools.partial(call, name)) for owner, name in _PLACES]
    of_tensor = Override(TensorVariable, "call_method", method_of_tensor)
    return [*places, of_tensor]


def _end_graph(name: str, variable: Any) -> NoReturn:
    end_graph("call of numpy", f"{name} {variable}", "What numpy computes is left to numpy.")


def _is_pure(function: Any) -> bool:
    if isinstance(function, type):
        return issubclass(function, (np.number, np.bool_))
    return isinstance(function, np.ufunc) or any(function is known for known in _PURE)
