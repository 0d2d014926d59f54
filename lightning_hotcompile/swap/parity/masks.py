"""Eager in 64 bit with the masks of its dropouts, where an accelerator has drawn them.

Its kernels draw other numbers for 64 bit than for 16 or 32, so such a run would be of another mask. Without
one to tell what is rounding, 16-bit code of a block with dropout, which sums over many rows, looks wrong, and
is compiled once more without its random numbers. So masks are read while eager runs as it is, and are given
to its run in 64 bit in place of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.clones import RandomState
from lightning_hotcompile.swap.parity.difference import Run, out_of_proportion, same_kinds
from lightning_hotcompile.swap.parity.trial import Trial
from lightning_hotcompile.swap.parity.widen import Widened
from lightning_hotcompile.swap.process.saved_tensors import Hooks, hooks_in_use

_DROPOUTS: frozenset[Callable[..., Any]] = frozenset({F.dropout, torch.dropout})


class _NoMasks(Exception):
    """They cannot be read, or are of no use."""


def run_with_masks(trial: Trial, eager: CompiledFn, seed: int, first: Run) -> Run | None:
    """The 64-bit run; ``None`` where more is drawn than dropouts, or a mask cannot be told for certain.

    Args:
        trial: of the graph.
        eager: the captured graph.
        seed: that ``first`` had.
        first: a run of it, as it is.
    """
    if not first.random or first.on_cpu or trial.holds_tensors:
        return None
    reads = _ReadsMasks()

    def read(*args: Any) -> Any:
        with reads:
            return eager(*args)

    try:
        trial.run(read, seed)
        wide = trial.run_in_64_bit(eager, seed, lambda: _GivesMasks(reads.masks))
    except Exception:  # noqa: BLE001  # no memory, or whatever the graph has against it
        return None
    if wide is None or wide.random or not same_kinds(first, wide):
        return None
    return None if out_of_proportion(first, wide) else wide  # else it is another mask all the same


def _draws(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, float] | None:
    """Input and probability of a dropout that draws."""

    def of(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return input, p, training, inplace

    value, p, training, inplace = of(*args, **{"p" if k == "train" else k: v for k, v in kwargs.items()})
    if inplace:
        raise _NoMasks
    return (value, float(p)) if training and 0 < p < 1 else None


class _ReadsMasks(TorchFunctionMode):
    """Inside, dropouts are what they are, and their masks are kept.

    A mask is what the same call makes of ones, with the numbers that the input has met. Where a checkpoint
    is to repeat a dropout, it would draw once more in the backward, which is not seen here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self._hooks: Hooks | None = None

    def __enter__(self) -> _ReadsMasks:
        self._hooks = hooks_in_use()
        found: _ReadsMasks = super().__enter__()  # type: ignore[no-untyped-call]
        return found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS or (drawn := _draws(args, kwargs)) is None:
            return func(*args, **kwargs)
        if hooks_in_use() != self._hooks:
            raise _NoMasks
        value, p = drawn
        before = RandomState()
        result, after = func(*args, **kwargs), RandomState()
        with torch.no_grad():
            before.put_back()
            mask = func(torch.ones_like(value), p, True) != 0
            after.put_back()
            if bool(((value != 0) & (mask != (result != 0))).any()):
                raise _NoMasks
        self.masks.append(mask)
        return result


class _GivesMasks(Widened):
    """Inside, all is in 64 bit, and each dropout has the mask that was read in its place."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self._left: Iterator[Tensor] = iter(masks)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _DROPOUTS or (drawn := _draws(args, kwargs or {})) is None:
            return super().__torch_function__(func, types, args, kwargs)
        value, p = drawn
        return value * next(self._left) / (1 - p)
