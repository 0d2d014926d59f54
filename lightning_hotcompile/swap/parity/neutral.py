"""A captured graph without its random numbers: what is left can be compared strictly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.parity.captured import copy_of

_STRIDE = 40_503
_LEVELS = 65_536
"""Odd number and power of two: their products modulo each other visit every level before one comes back."""


def neutralised(graph_module: GraphModule) -> GraphModule:
    """A copy whose known random operations give the same numbers in each run, of the same shape and dtype.

    Dropout passes its input through. An operation that is not known stays as it is: whether one is left
    shows when the copy runs, by the state of the random generator.
    """
    return copy_of(graph_module, _replace)


def _replace(node: Node) -> None:
    if node.op == "call_function" and (function := _FUNCTIONS.get(node.target)) is not None:
        node.target = function
    elif node.op == "call_method" and (function := _METHODS.get(str(node.target))) is not None:
        node.op, node.target = "call_function", function


# --- the numbers: exact in every dtype, since they are whole numbers over a power of two ----------------


def _levels(like: Tensor) -> Tensor:
    return (torch.arange(like.numel(), device=like.device) * _STRIDE % _LEVELS).view(like.shape)


def _uniform(like: Tensor) -> Tensor:
    return (_levels(like).float() / _LEVELS).to(like.dtype)


def _gaussian(like: Tensor) -> Tensor:
    return (_levels(like).float() / (_LEVELS // 4) - 2).to(like.dtype)


def _positive(like: Tensor) -> Tensor:
    return (_levels(like).float() / _LEVELS + 0.5).to(like.dtype)


def _coin(like: Tensor) -> Tensor:
    return (_levels(like) // 2 % 2).to(like.dtype)


def _small_count(like: Tensor) -> Tensor:
    return (_levels(like) % 3).to(like.dtype)


def _whole(like: Tensor, low: int, high: int) -> Tensor:
    return (_levels(like) % (high - low) + low).to(like.dtype)


# --- stand-ins; their arguments are those of the operations ---------------------------------------------


def _factory(values: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def stand_in(*size: Any, generator: Any = None, **options: Any) -> Tensor:
        return values(torch.empty(*size, **options))

    return stand_in


def _like(values: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def stand_in(input: Tensor, *_: Any, generator: Any = None, p: Any = None, **options: Any) -> Tensor:
        return values(torch.empty_like(input, **options))

    return stand_in


def _in_place(values: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def stand_in(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.copy_(values(input.detach()))

    return stand_in


def _randint(
    *args: Any, size: Any = None, low: int = 0, high: int = 0, generator: Any = None, **options: Any
) -> Tensor:
    *bounds, size = args if size is None else (*args, size)
    low, high = bounds if len(bounds) == 2 else (low, *bounds) if bounds else (low, high)
    return _whole(torch.empty(size, **{"dtype": torch.int64, **options}), low, high)


def _randint_like(
    input: Tensor, *bounds: int, low: int = 0, high: int = 0, generator: Any = None, **options: Any
) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (low, *bounds) if bounds else (low, high)
    return _whole(torch.empty_like(input, **options), low, high)


def _randperm(n: int, generator: Any = None, **options: Any) -> Tensor:
    return torch.arange(n, **{"dtype": torch.int64, **options}).flip(0)


def _normal(
    mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, generator: Any = None, **options: Any
) -> Tensor:
    if size is not None:
        like = torch.empty(size, **options)
    else:
        like = (mean + std) if isinstance(mean, Tensor) or isinstance(std, Tensor) else torch.empty(())
    values: Tensor = std * _gaussian(like.detach()) + mean
    return values


def _multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    index = torch.arange(num_samples, device=input.device) % input.shape[-1]
    return index.expand(*input.shape[:-1], num_samples).contiguous()


def _passed_through(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any
) -> Tensor:
    return input if inplace else input.clone()


def _unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> Tensor:
    return F.leaky_relu(input, (lower + upper) / 2)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *args: Any,
    **k: Any,
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **k)


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    soft = ((logits + _gaussian(logits.detach())) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter_(dim, index, 1.0) - soft.detach() + soft


_MULTI_HEAD_DROPOUT = 10  # the position of dropout_p among the arguments


def _multi_head(*args: Any, **options: Any) -> Any:
    if len(args) > _MULTI_HEAD_DROPOUT:
        args = (*args[:_MULTI_HEAD_DROPOUT], 0.0, *args[_MULTI_HEAD_DROPOUT + 1 :])
    else:
        options["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*args, **options)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.rand: _factory(_uniform),
    torch.randn: _factory(_gaussian),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_gaussian),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _like(_coin),
    torch.poisson: _like(_small_count),
    torch.multinomial: _multinomial,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.gumbel_softmax: _gumbel_softmax,
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    **dict.fromkeys(
        (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.alpha_dropout,
            torch.feature_dropout,
            torch.feature_alpha_dropout,
        ),
        _passed_through,
    ),
    **dict.fromkeys(
        (torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_),
        _unchanged,
    ),
}

_METHODS: dict[str, Callable[..., Any]] = {
    "bernoulli": _like(_coin),
    "multinomial": _multinomial,
    "uniform_": _in_place(_uniform),
    "normal_": _in_place(_gaussian),
    "log_normal_": _in_place(_positive),
    "exponential_": _in_place(_positive),
    "cauchy_": _in_place(_gaussian),
    "bernoulli_": _in_place(_coin),
    "geometric_": _in_place(lambda like: _small_count(like) + 1),
}
