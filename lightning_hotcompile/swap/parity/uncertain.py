"""Whether compiled code is as near to eager as eager is to itself where its inputs differ in the last digit.

A step that chooses (the hardest negative of a batch, the nearest code, an expert) can hang on the last digit:
two distances that are the same but for rounding are told apart by it, and all gradients go the other way.
Compiled code, which rounds otherwise, is then as right as eager is, and a 64-bit run does not show that where
eager happens to choose like it. An error that is not rounding shows all the same: it has nothing to do with
how far eager moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.difference import Run, is_close, pairs, same_kinds
from lightning_hotcompile.swap.parity.proportion import norm
from lightning_hotcompile.swap.parity.trial import Trial

RUNS = 6
"""Of eager, each with other last digits: a choice between two that are alike falls the other way in half."""

FACTOR = 2.0
"""Compiled code may be so many times as far from eager as eager is from itself."""

_NUDGE = 2.0
"""Of an input, in units of its last place: as much as the rounding of the operations that are before it."""


def is_as_uncertain(trial: Trial, eager: CompiledFn, seed: int, first: Run, compiled: Run) -> bool:
    """Whether each tensor that is not close is as near to eager as eager is to itself.

    Args:
        trial: of the graph; one that holds tensors, an optimizer's, chooses nothing.
        eager: the captured graph.
        seed: that both runs had.
        first: a run of it, as it is.
        compiled: one of compiled code, with outputs and gradients of the same shapes.
    """
    apart = list(_distances(first, compiled))
    if trial.holds_tensors or not all(map(math.isfinite, apart)):
        return False
    farthest = [0.0] * len(apart)
    try:
        for number in range(RUNS):
            other = trial.run(_nudged(eager, number), seed)
            if not same_kinds(first, other):
                return False
            moved = [0.0 if x is None or y is None else _apart(x, y) for x, y in pairs(first, other)]
            farthest = [max(a, b) for a, b in zip(farthest, moved, strict=True)]
            if all(a == 0 or a <= FACTOR * b < math.inf for a, b in zip(apart, farthest, strict=True)):
                return True
    except torch.OutOfMemoryError:
        pass  # what differs counts as wrong
    return False


def _distances(first: Run, compiled: Run) -> Iterator[float]:
    """Of each tensor how far it is from eager's; 0 if it is close."""
    moved: list[float | None] = [None] * (len(first.tensors) + len(first.gradients))
    moved += first.movement or [None] * len(first.inputs)
    for (x, y), movement in zip(pairs(first, compiled), moved, strict=True):
        close = x is None or y is None or is_close(x, y, movement)
        yield 0.0 if close or x is None or y is None else _apart(x, y)


def _apart(x: Tensor, y: Tensor) -> float:
    """Infinite where numbers that are no floats differ: an index has no last digit."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0 if torch.equal(x, y) else math.inf
    return norm(x, y)


def _nudged(function: CompiledFn, number: int) -> CompiledFn:
    """The same, with other last digits of its inputs; views of one memory stay alike."""

    def nudged(*args: Any) -> Any:
        # Torch can hardly do anything with 8-bit floats.
        tensors = (t for t in args if isinstance(t, Tensor) and t.numel())
        floats = (t for t in tensors if t.is_floating_point() and t.element_size() > 1)
        memory = {t.untyped_storage().data_ptr(): t for t in floats}
        for i, tensor in enumerate(memory.values()):
            _nudge(tensor, 1000 * number + i)
        return function(*args)

    return nudged


@torch.no_grad()
def _nudge(tensor: Tensor, seed: int) -> None:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    generator = torch.Generator(tensor.device).manual_seed(seed)
    up_and_down = 2 * torch.rand(whole.shape, generator=generator, device=whole.device) - 1
    whole.addcmul_(whole, up_and_down.to(whole.dtype), value=_NUDGE * torch.finfo(whole.dtype).eps)
