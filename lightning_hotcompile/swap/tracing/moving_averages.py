"""Moving averages with a momentum that changes: it is an input of the graph, as where it scales a tensor.

``average.mul_(m).add_(weight, alpha=1 - m)``, ``average.lerp_(weight, 1 - m)`` and the same over lists of
tensors take it as a plain number, of which Dynamo makes a constant: each other value is a compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.changing_numbers import is_symbol
from lightning_hotcompile.swap.tracing.overrides import Override

_PRECISE = frozenset({torch.float32, torch.float64})
"""Eager scales in the longest of the kinds: in shorter numbers the product would be rounded once more."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise: these operations are traced as others that take tensors."""

    def method(prior: Any, variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        found = _traced(tx, _METHODS.get(name), [variable, *args], kwargs)
        return prior(variable, tx, name, args, kwargs) if found is None else found

    def function(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        found = _traced(tx, _FUNCTIONS.get(variable.value), args, kwargs)
        return prior(variable, tx, args, kwargs) if found is None else found

    return [
        Override(TensorVariable, "call_method", method),
        Override(TorchInGraphFunctionVariable, "call_function", function),
    ]


def _traced(tx: Any, instead: Callable[..., Any] | None, args: Sequence[Any], kwargs: Any) -> Any:
    """What a call gives, if it is one with a number that changes; else ``None``."""
    if instead is None or not args or kwargs.keys() - {"alpha", "weight"}:
        return None
    number = kwargs.get("alpha") if instead in _SCALED else kwargs.get("weight", args[-1])
    if number is None or not is_symbol(number, float):
        return None
    if not _are_precise([each for each in args if each is not number]):
        return None
    return tx.inline_user_function_return(VariableTracker.build(tx, instead), list(args), kwargs)


def _are_precise(variables: Sequence[Any]) -> bool:
    """Whether they are tensors of one kind, 32 bit floats or longer ones, or lists of such."""
    found = [variable.realize() for variable in variables]
    each = [one for v in found for one in (v.items if isinstance(v, BaseListVariable) else [v])]
    dtypes = {getattr(one.realize(), "dtype", None) for one in each}
    return len(dtypes) == 1 and dtypes <= _PRECISE


def _tensor(number: float, like: Tensor) -> Tensor:
    return torch.ones((), dtype=like.dtype, device=like.device) * number


def _add(tensor: Tensor, other: Any, *, alpha: float) -> Tensor:
    return torch.add(tensor, other * alpha)


def _add_(tensor: Tensor, other: Any, *, alpha: float) -> Tensor:
    return tensor.add_(other * alpha)


def _sub(tensor: Tensor, other: Any, *, alpha: float) -> Tensor:
    return torch.sub(tensor, other * alpha)


def _sub_(tensor: Tensor, other: Any, *, alpha: float) -> Tensor:
    return tensor.sub_(other * alpha)


def _lerp(tensor: Tensor, end: Tensor, weight: float) -> Tensor:
    return torch.lerp(tensor, end, _tensor(weight, tensor))


def _lerp_(tensor: Tensor, end: Tensor, weight: float) -> Tensor:
    return tensor.lerp_(end, _tensor(weight, tensor))


def _foreach_mul(tensors: list[Tensor], scalar: float) -> Any:
    return torch._foreach_mul(tensors, _tensor(scalar, tensors[0]))


def _foreach_mul_(tensors: list[Tensor], scalar: float) -> Any:
    return torch._foreach_mul_(tensors, _tensor(scalar, tensors[0]))


def _foreach_add(tensors: list[Tensor], others: list[Tensor], *, alpha: float) -> Any:
    return torch._foreach_add(tensors, torch._foreach_mul(others, _tensor(alpha, tensors[0])))


def _foreach_add_(tensors: list[Tensor], others: list[Tensor], *, alpha: float) -> Any:
    return torch._foreach_add_(tensors, torch._foreach_mul(others, _tensor(alpha, tensors[0])))


def _foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> Any:
    ways = torch._foreach_mul(torch._foreach_sub(ends, tensors), _tensor(weight, tensors[0]))
    return torch._foreach_add_(tensors, ways)


_METHODS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "add_": _add_,
    "sub": _sub,
    "sub_": _sub_,
    "lerp": _lerp,
    "lerp_": _lerp_,
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.add: _add,
    torch.sub: _sub,
    torch.lerp: _lerp,
    torch._foreach_mul: _foreach_mul,
    torch._foreach_mul_: _foreach_mul_,
    torch._foreach_add: _foreach_add,
    torch._foreach_add_: _foreach_add_,
    torch._foreach_lerp_: _foreach_lerp_,
}
_SCALED = frozenset({_add, _add_, _sub, _sub_, _foreach_add, _foreach_add_})
"""Those that take the number by name."""
