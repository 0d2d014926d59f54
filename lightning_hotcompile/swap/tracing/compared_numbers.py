"""Numbers that vary are looked for, told apart and chosen as Python does it.

Dynamo looks for a constant among the constants of a list only, so ``5 in self.steps`` is false where
those vary (torch before 2.14), and so is ``4 in x.shape`` with a batch of any size. What a comparison
of sizes has found is not ``True`` to it. And the largest of whole numbers and floats is a float.

Of two losses ``max`` returns one, and the other has no gradient. Dynamo makes that ``torch.maximum`` or a
``clamp``, by which the other one has zeros, and each of two that are equal has a half.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import utils
from torch._dynamo.variables import (
    BaseListVariable,
    BuiltinVariable,
    ConstantVariable,
    UserDefinedObjectVariable,
    lists,
)
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from lightning_hotcompile.swap.tracing.changing_numbers import known
from lightning_hotcompile.swap.tracing.masked_values import has_gradient
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_IS = (operator.is_, operator.is_not)
_CHOOSE: dict[Any, Callable[[Any, Any], Any]] = {max: operator.gt, min: operator.lt}


def overrides() -> list[Override]:
    """What Dynamo does otherwise: such numbers are compared at once, with a guard on the outcome."""

    def contains(prior: Any, items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items, sought = [item.realize() for item in items], search.realize()
        if _is_number(sought) and any(map(_may_be_equal, items)):
            end_graph("search for a number", f"{sought} in {items}", "What is there may be equal to it.")
        if not (_is_number(sought) and any(isinstance(item, SymNodeVariable) for item in items)):
            return prior(items, search, tx, *args, **kwargs)
        are_numbers = (item for item in items if _is_number(item))
        return ConstantVariable.create(any(_holds(tx, operator.eq, item, sought) for item in are_numbers))

    def call(prior: Any, function: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if function.fn in _IS:
            args = [known(tx, arg) for arg in args]
        elif function.fn in _CHOOSE and not kwargs and _are_mixed(numbers := _given(args)):
            return _chosen(tx, _CHOOSE[function.fn], numbers)
        return prior(function, tx, args, kwargs)

    def choose(prior: Any, function: Any, tx: Any, *two: Any) -> Any:
        if torch.is_grad_enabled() and any(one is not None and has_gradient(one) for one in two):
            end_graph(
                f"{function.fn.__name__} of tensors with gradients",
                str(two),
                "Python returns one of them, and the other one has no gradient.",
                "Call torch.maximum, torch.minimum or clamp instead.",
            )
        return prior(function, tx, *two)

    return [
        *(Override(owner, "iter_contains", contains) for owner in (utils, lists)),
        Override(BuiltinVariable, "call_function", call),
        Override(BuiltinVariable, "_call_min_max_binary", choose),
    ]


def _holds(tx: Any, comparison: Callable[[Any, Any], Any], *numbers: Any) -> bool:
    outcome = known(tx, BuiltinVariable(comparison).call_function(tx, list(numbers), {}))
    return bool(outcome.as_python_constant())


def _may_be_equal(variable: Any) -> bool:
    """Whether what is no number of Python's may be equal to one: Dynamo does not ask it."""
    if isinstance(variable, UserDefinedObjectVariable):
        return type(variable.value).__eq__ is not object.__eq__
    return isinstance(variable, TensorVariable)


def _is_number(variable: Any) -> bool:
    if isinstance(variable, SymNodeVariable):
        return True
    return isinstance(variable, ConstantVariable) and isinstance(variable.value, (int, float))


def _given(args: Sequence[Any]) -> list[Any]:
    found = [arg.realize() for arg in args]
    if len(found) == 1:
        return [item.realize() for item in found[0].items] if isinstance(found[0], BaseListVariable) else []
    return found


def _are_mixed(numbers: Sequence[Any]) -> bool:
    """Whether they are whole ones and others, and some vary."""
    if not (all(map(_is_number, numbers)) and any(isinstance(number, SymNodeVariable) for number in numbers)):
        return False
    return len({number.python_type() for number in numbers}) > 1


def _chosen(tx: Any, is_better: Callable[[Any, Any], Any], numbers: Sequence[Any]) -> Any:
    """The first of the best, as Python finds it."""
    best, *others = numbers
    for number in others:
        if _holds(tx, is_better, number, best):
            best = number
    return best
