"""Whether a difference is small beside the tensor that it is in.

Small numbers can be all wrong and still be within an absolute tolerance: one of 1e-3 says nothing about
gradients of 1e-4, nor about an update by a learning rate of 3e-4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_hotcompile.swap.parity.tensors import AT_A_TIME, HAVE_64_BIT, dense, without_odd_places

SHARE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""How far apart a tensor may be, as a share of its size, or of how far the graph has moved it; by dtype."""

GROSS = 1e-1
"""The same where eager has no 64-bit run that would tell what is rounding. Not of an optimizer's step, which
sums over nothing: where it leaves a few of many elements out, it is off by little."""

_OF_THE_LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""As a share of the largest tensor of its kind: a gradient that should be zero is nothing but rounding."""

_NEAR = 10.0
"""Compiled code may be so many times as far from the 64-bit run as eager is: that is much by chance only."""

_ROUNDINGS = 2.0
"""Units in the last place of what is written anew."""


def norm(tensor: Tensor, other: Tensor | None = None) -> float:
    """Euclidean length of a tensor, or of the difference of two; infinite or NaN where one of them is."""
    if other is not None and other.shape != tensor.shape:
        return math.inf
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    parts = [_squares(x, y) for x, y in _in_parts(tensor, other)]
    return math.sqrt(float(torch.stack(parts).sum()))


def movements(after: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[float, ...]:
    """How far each tensor has moved."""
    return tuple(norm(dense(x), dense(y)) for x, y in zip(after, before, strict=True))


def largest_share(
    eager: Sequence[Tensor | None],
    compiled: Sequence[Tensor | None],
    wide: Sequence[Tensor | None] | None = None,
    *,
    moved: Sequence[float] | None = None,
    strict: bool = False,
    unit: float = 0.0,
    may_cancel: bool = True,
) -> float:
    """The largest difference as a share of the tensor that it is in; 0 if all of them are rounding.

    Args:
        eager: tensors of one kind: the outputs, the gradients, or the inputs afterwards.
        compiled: the same of the other run.
        wide: the same of a 64-bit run, which tells what is rounding.
        moved: how far eager has moved each, which is then its size; ``None`` for the tensor itself.
        strict: nothing is taken for rounding: a first look, as long as nobody has asked for a 64-bit run.
            Without one that is there and is not strict, only large shares count.
        unit: the size of numbers beside which a difference in the last place does not count; 0 for none.
        may_cancel: whether what is small beside the others may be what rounding has left of a zero.
    """
    both = [_both(x, y) for x, y in zip(eager, compiled, strict=True)]
    sizes = list(moved) if moved is not None else [0.0 if b is None else norm(b[0]) for b in both]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    worst = 0.0
    for i, (pair, size) in enumerate(zip(both, sizes, strict=True)):
        if pair is None or not math.isfinite(size):
            continue
        x, y = pair
        share = SHARE.get(x.dtype, SHARE[torch.float32]) * size
        apart, allowed = norm(x, y), share
        exact = None if wide is None or (found := wide[i]) is None else dense(found)
        if apart > share and not strict:
            rounding = _last_places(x, unit if moved is None else None)
            rounding = max(rounding, _of_a_zero(x, largest)) if may_cancel else rounding
            if exact is None:
                allowed = max(GROSS * size if may_cancel else share, rounding)
            else:
                off, apart = norm(x, exact), norm(y, exact)
                is_right = size > 0 and off <= share
                allowed = share if is_right else max(share, rounding, _NEAR * off)
        if math.isfinite(apart) and apart > allowed:
            worst = max(worst, norm(x, y) / size if size else math.inf)
    return worst


def are_left_of_zeros(apart: Sequence[tuple[Tensor, Tensor]], among: Sequence[Tensor | None]) -> bool:
    """Whether gradients that are apart are, in eager as well, no more than rounding may leave of a zero.

    An absolute tolerance knows no size. Where a loss is a sum over the batch, gradients are some thousands,
    and what rounding makes of that of a bias before a normalisation, which is zero, is more than 1e-3.
    Gradients of 16 bits are held to the absolute one alone.

    Args:
        apart: eager's gradient and that of compiled code, of each that is not close by its numbers.
        among: all of eager's gradients.
    """
    sizes = [norm(dense(each)) for each in among if each is not None]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return all(
        torch.finfo(x.dtype).bits >= 32 and norm(x) <= (most := _of_a_zero(x, largest)) and norm(x, y) <= most
        for x, y in apart
    )


def _of_a_zero(tensor: Tensor, largest: float) -> float:
    """What rounding may leave of a zero, beside the largest tensor of its kind.

    There may be nothing else: what is fitted exactly has no other gradients, and in 64 bit nothing tells.
    """
    if torch.finfo(tensor.dtype).bits == 64:
        largest = max(largest, math.sqrt(tensor.numel()))
    return _OF_THE_LARGEST.get(tensor.dtype, _OF_THE_LARGEST[torch.float32]) * largest


def _both(x: Tensor | None, y: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if x is None or y is None or x.shape != y.shape or not (x.is_floating_point() or x.is_complex()):
        return None
    return without_odd_places(dense(x), dense(y))


def _last_places(tensor: Tensor, unit: float | None) -> float:
    """The length of a difference in the last places, of numbers of a size or (``None``) of its own."""
    size = norm(tensor) if unit is None else unit * math.sqrt(tensor.numel())
    return _ROUNDINGS * torch.finfo(tensor.dtype).eps * size


def _in_parts(tensor: Tensor, other: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    parts = torch.split(tensor.reshape(-1), AT_A_TIME)
    others = [None] * len(parts) if other is None else torch.split(other.reshape(-1), AT_A_TIME)
    yield from zip(parts, others, strict=True)


@torch.no_grad()
def _squares(x: Tensor, y: Tensor | None) -> Tensor:
    if x.device.type not in HAVE_64_BIT:
        x, y = x.cpu(), None if y is None else y.cpu()
    wide = torch.complex128 if x.is_complex() else torch.float64
    x = x.to(wide) if y is None else x.to(wide) - y
    return x.abs().square().sum()
