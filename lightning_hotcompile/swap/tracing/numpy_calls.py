"""What numpy computes in a step is computed by numpy, traced or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable

from lightning_hotcompile.swap.tracing.numpy_numbers import computed_as_numpy_does, outcome
from lightning_hotcompile.swap.tracing.overrides import Override

_PLACES: tuple[tuple[Any, str], ...] = (
    (NumpyVariable, "call_function"),
    (NumpyNdarrayVariable, "call_method"),
    (TensorVariable, "method_numpy"),
)
"""Where Dynamo would begin to stand in for numpy: a call of a function, of a method, an array of a tensor."""

_PURE = (np.prod, np.sum, np.mean, np.max, np.min, np.clip, np.round)
"""With numbers in and a number out, as are all ufuncs (``np.sqrt``) and types (``np.float32``)."""


def numpy_by_numpy(break_the_graph: Callable[..., Any]) -> list[Override]:
    """Dynamo leaves numpy alone, at the price of a graph break; what has numbers only is a number.

    It would stand in for numpy with torch operations. They draw random numbers from torch's generator, and
    where they are not quite like numpy's (``np.percentile`` gives an array for a number), code of the user's
    that is right raises, or is wrong. Arrays that come into a traced frame stay inputs of its graph, which
    is why ``trace_numpy`` is not switched off: they would be constants then.

    Args:
        break_the_graph: Dynamo's function that ends a graph, with a reason in its four arguments.
    """

    def call(name: str, prior: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_pure = name == "call_function" and _is_pure(variable.value)
        if is_pure and (found := outcome(variable.value, *args, **kwargs)) is not None:
            return found
        return break_the_graph(
            gb_type="call of numpy",
            context=f"{name} {variable}",
            explanation="What numpy computes is left to numpy.",
            hints=[],
        )

    places = [Override(owner, name, functools.partial(call, name)) for owner, name in _PLACES]
    return [*places, *computed_as_numpy_does(break_the_graph)]


def _is_pure(function: Any) -> bool:
    if isinstance(function, type):
        return issubclass(function, (np.number, np.bool_))
    return isinstance(function, np.ufunc) or any(function is known for known in _PURE)
