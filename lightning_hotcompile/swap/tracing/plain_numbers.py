"""Operations that take a plain number go with one that changes, as a product with it does.

Of the number in ``average.mul_(m).add_(weight, alpha=1 - m)``, ``average.lerp_(weight, 1 - m)``,
``ratio.clamp(1 - eps, 1 + eps)`` and ``torch.full(size, level)`` Dynamo makes a constant: each other value is
a compile. Here it is put into a tensor, and the operation is traced as its twin that takes tensors. So is
what a graph gives back as a number, to be logged, say.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.torch_version import TorchVersion

from lightning_hotcompile.swap.tracing.changing_numbers import has_float, is_symbol
from lightning_hotcompile.swap.tracing.overrides import Override

_PRECISE = frozenset({torch.float32, torch.float64})
"""Eager computes with the number in the longest of the kinds: in shorter ones it would be rounded again."""

_KEEPS_LIMITS = TorchVersion(torch.__version__) < "2.14"
"""Whether what is at the limit of a ``clamp`` has a gradient in eager."""

_BESIDE = frozenset({"condition", "device", "mask", "size"})
"""Arguments that say nothing about the kind in which it is computed."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise: these operations are traced as others that take tensors."""

    def method(prior: Any, variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        found = _traced(tx, _METHODS.get(name), [variable, *args], kwargs)
        return prior(variable, tx, name, args, kwargs) if found is None else found

    def function(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        found = _traced(tx, _FUNCTIONS.get(variable.value), args, kwargs)
        return prior(variable, tx, args, kwargs) if found is None else found

    def operation(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        found = _traced(tx, _OPERATORS.get(variable.fn), args, kwargs)
        return prior(variable, tx, args, kwargs) if found is None else found

    def given_back(prior: Any, number: Any, tx: Any, dtype: torch.dtype) -> Any:
        if number._tensor_var is None and has_float(number.sym_num):
            one = VariableTracker.build(tx, torch.ones).call_function(
                tx, [VariableTracker.build(tx, ())], {"dtype": VariableTracker.build(tx, dtype)}
            )
            number._tensor_var = BuiltinVariable(operator.mul).call_function(tx, [one, number], {})
        return prior(number, tx, dtype)

    return [
        Override(TensorVariable, "call_method", method),
        Override(TorchInGraphFunctionVariable, "call_function", function),
        Override(BuiltinVariable, "call_function", operation),
        Override(SymNodeVariable, "as_tensor", given_back),
    ]


def _traced(tx: Any, instead: Callable[..., Any] | None, args: Sequence[Any], kwargs: Any) -> Any:
    """What a call gives, if it is one with a number that changes; else ``None``."""
    if instead is None:
        return None
    try:
        given = _signature(instead).bind(*args, **kwargs).arguments
    except TypeError:
        return None  # called in another way than it is known here
    if not any(is_symbol(each, float) for each in given.values()) or not _is_precise(instead, given):
        return None
    return tx.inline_user_function_return(VariableTracker.build(tx, instead), list(args), kwargs)


@functools.cache
def _signature(instead: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(instead)


def _is_precise(instead: Callable[..., Any], given: Mapping[str, Any]) -> bool:
    """Whether it is computed in one kind of floats, of 32 bits or longer."""
    kinds = {kind for name, each in given.items() if name not in _BESIDE for kind in _kinds(name, each)}
    if instead in _MAKING and not kinds:
        kinds = {torch.get_default_dtype()}
    return len(kinds) == 1 and kinds <= _PRECISE


def _kinds(name: str, variable: Any) -> Iterable[torch.dtype | None]:
    """Of a tensor, a list of tensors or the argument ``dtype``; of a number none, of all else ``None``."""
    found = variable.realize()
    if name == "dtype":
        return [] if found.as_python_constant() is None else [found.as_python_constant()]
    if isinstance(found, BaseListVariable):
        return [getattr(each.realize(), "dtype", None) for each in found.items]
    if isinstance(found, (SymNodeVariable, ConstantVariable)):
        return []
    return [getattr(found, "dtype", None)]


def _tensor(number: float, like: Tensor) -> Tensor:
    return torch.ones((), dtype=like.dtype, device=like.device) * number


def _limit(number: float | None, like: Tensor) -> Tensor | None:
    return None if number is None else _tensor(number, like)


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


def _clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """A limit that is a tensor lets other gradients through than a scalar one, from torch 2.14 on."""
    least, most = _limit(min, input), _limit(max, input)
    is_kept = _is_within(input, least, most)
    return torch.where(is_kept, input, torch.clamp(input.detach(), least, most))


def _is_within(input: Tensor, least: Tensor | None, most: Tensor | None) -> Tensor:
    above, below = (torch.ge, torch.le) if _KEEPS_LIMITS else (torch.gt, torch.lt)
    inside = torch.ones_like(input, dtype=torch.bool)
    inside = inside if least is None else inside & above(input, least)
    return inside if most is None else inside & below(input, most)


def _clamp_(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return input.copy_(_clamp(input, min, max))


def _clamp_min(input: Tensor, min: float) -> Tensor:
    return _clamp(input, min)


def _clamp_max(input: Tensor, max: float) -> Tensor:
    return _clamp(input, None, max)


def _masked_fill(input: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.masked_fill(input, mask, _tensor(value, input))


def _masked_fill_(input: Tensor, mask: Tensor, value: float) -> Tensor:
    return input.masked_fill_(mask, _tensor(value, input))


def _where(condition: Tensor, input: Any, other: Any) -> Tensor:
    if isinstance(input, Tensor):
        return torch.where(condition, input, _tensor(other, input))
    return torch.where(condition, _tensor(input, other), other)


def _where_of(input: Tensor, condition: Tensor, other: float) -> Tensor:
    return torch.where(condition, input, _tensor(other, input))


def _pow(base: Any, exponent: Any) -> Tensor:
    if isinstance(base, Tensor):
        return torch.pow(base, _tensor(exponent, base))
    return torch.pow(_tensor(base, exponent), exponent)


def _power(input: Tensor, exponent: Any) -> Tensor:
    return _pow(input, exponent)


def _fill_(input: Tensor, value: float) -> Tensor:
    return input.fill_(_tensor(value, input))


def _full_like(input: Tensor, fill_value: float) -> Tensor:
    return torch.ones_like(input) * fill_value


def _new_full(input: Tensor, size: Any, fill_value: float) -> Tensor:
    return input.new_ones(size) * fill_value


def _full(size: Any, fill_value: float, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.ones(size, dtype=dtype, device=device) * fill_value


def _new_tensor(input: Tensor, data: float) -> Tensor:
    return input.new_ones(()) * data


def _made(data: float, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.ones((), dtype=dtype, device=device) * data


_METHODS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "add_": _add_,
    "sub": _sub,
    "sub_": _sub_,
    "lerp": _lerp,
    "lerp_": _lerp_,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("clamp_", "clip_"), _clamp_),
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill_,
    "where": _where_of,
    "fill_": _fill_,
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    "pow": _power,
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
    **dict.fromkeys((torch.clamp, torch.clip), _clamp),
    torch.clamp_min: _clamp_min,
    torch.clamp_max: _clamp_max,
    torch.masked_fill: _masked_fill,
    torch.where: _where,
    torch.full_like: _full_like,
    torch.full: _full,
    **dict.fromkeys((torch.tensor, torch.as_tensor), _made),
    torch.pow: _power,
}
_MAKING = frozenset({_full, _made})
"""Those that make a tensor of no other one."""

_OPERATORS: dict[Any, Callable[..., Any]] = dict.fromkeys((pow, operator.pow), _pow)
