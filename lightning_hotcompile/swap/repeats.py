"""Activation checkpoints repeat a forward as it ran: compiled what ran compiled, eager what did not.

A checkpoint that is not reentrant holds the tensors that its forward saves against those that are saved when
a backward repeats it, and compiled code saves others than eager code. Losses of several batches may be kept
for one backward: by then a step may be on another lane, and the plan out of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch.utils.checkpoint

from lightning_hotcompile.swap.compiled_function import without_disable
from lightning_hotcompile.swap.graphs.saved_tensors import Hooks

_OF_CHECKPOINTS = torch.utils.checkpoint.__name__
_FRAME, _FRAME_REF = "frame", "target_frame_ref"
"""By what names torch's hooks hold a checkpoint: those of a forward, and those of what is repeated."""


class Repeatable(Protocol):
    """A region, as far as checkpoints have to do with it."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model is changed now."""

    def put_again(self) -> None:
        """Change the model that was changed before."""

    def take_out(self) -> None:
        """Change the model back."""


class _AsItRan:
    """What a checkpoint repeats, with the regions in place that ran compiled in its forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.regions: list[Repeatable] = []

    def __call__(self, *args: Any) -> Any:
        with contextlib.ExitStack() as undo:
            for region in self.regions:
                if not region.is_in_place:
                    region.put_again()
                    undo.callback(region.take_out)
            return self._forward(*args)


def checkpoint_of(hooks: Hooks) -> tuple[Any, bool] | None:
    """Torch's own record of the checkpoint whose hooks these are, and whether a backward repeats it.

    ``None`` for hooks of others; takes half a microsecond.
    """
    if getattr(hooks[0], "__module__", None) != _OF_CHECKPOINTS:
        return None
    pack: Any = without_disable(hooks[0])
    names = pack.__code__.co_freevars
    if _FRAME in names:
        return pack.__closure__[names.index(_FRAME)].cell_contents, False
    if _FRAME_REF in names:
        return pack.__closure__[names.index(_FRAME_REF)].cell_contents(), True
    return None


def note_compiled(frame: Any, region: Repeatable) -> None:
    """Remember that compiled code of a region ran in the forward of a checkpoint."""
    if type(frame.recompute_fn) is not _AsItRan:
        frame.recompute_fn = _AsItRan(frame.recompute_fn)
    if region not in frame.recompute_fn.regions:
        frame.recompute_fn.regions.append(region)


def ran_compiled(frame: Any, region: Repeatable) -> bool:
    """Whether compiled code of a region ran in the forward of a checkpoint."""
    return type(frame.recompute_fn) is _AsItRan and region in frame.recompute_fn.regions
