"""Activation checkpoints repeat a forward as it ran: compiled what ran compiled, eager what did not.

A checkpoint that is not reentrant holds the tensors that its forward saves against those that are saved when
a backward repeats it, and compiled code saves others than eager code. Losses of several batches may be kept
for one backward: by then a step may be on another lane, and the plan out of the model. Or compiled code of a
region has failed since: then eager answers, but what had run compiled before is repeated so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.utils.checkpoint

from lightning_hotcompile.errors import warn
from lightning_hotcompile.swap.compiled_function import without_disable
from lightning_hotcompile.swap.dynamo import StopRecompute
from lightning_hotcompile.swap.process.free_memory import let_go
from lightning_hotcompile.swap.process.saved_tensors import Hooks, hooks_in_use
from lightning_hotcompile.swap.ranks import has_other_ranks

_OF_CHECKPOINTS = torch.utils.checkpoint.__name__
_FRAME, _FRAME_REF, _GROUP = "frame", "target_frame_ref", "gid"
"""By what names torch's hooks hold a checkpoint: those of a forward, and those of what is repeated; and for
which backward it is repeated."""


class Repeatable(Protocol):
    """What is asked of a region when a checkpoint repeats a forward."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model is changed now."""

    def put_again(self) -> None:
        """Change the model that was changed before."""

    def take_out(self) -> None:
        """Change the model back."""


class _AsItRan:
    """What a checkpoint repeats, with the regions in place that ran compiled in its forward.

    Where compiled code fails in a repeat, eager cannot answer. On a single rank all is repeated once more,
    from the random state of the forward: what failed may have been out of memory.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.regions: list[Repeatable] = []
        self.notes: dict[object, list[Any]] = {}
        """On each run of a graph in the forward, in their order, and on each call of a region."""

        self.graphs: list[object] = []
        """That ran in the forward, in their order."""

        self._left: dict[object, Iterator[Any]] = {}
        self._failure: tuple[str, Exception] | None = None

    def failed(self, region: str, failure: Exception) -> None:
        """Compiled code has, in what is repeated now."""
        self._failure = region, failure

    def next_note(self, on: object) -> Any:
        """That on the run or call which is repeated next, ``None`` if the forward had no such one."""
        if on not in self._left:
            self._left[on] = iter(self.notes.get(on, ()))
        return next(self._left[on], None)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._repeat(args)
        except StopRecompute:
            raise
        except Exception as error:
            if (failure := self._failure) is None or not _comes_from(error, failure[1]):
                raise
            if has_other_ranks():  # a collective that is called once more would be one that they do not call
                raise
            self._failure = None
            let_go(failure[1])
        return self._once_more(*failure, args)

    def _once_more(self, region: str, failure: Exception, args: tuple[Any, ...]) -> Any:
        forget_repeated(hooks_in_use())
        try:
            return self._repeat(args)
        except StopRecompute:
            raise
        except Exception:  # noqa: BLE001  # the first error tells more
            warn(
                f"compiled code of {region} failed twice where an activation checkpoint repeats it. Eager "
                "cannot answer there, since the forward ran compiled. Leave it out with keep_eager."
            )
        raise failure

    def _repeat(self, args: tuple[Any, ...]) -> Any:
        self._left, self._failure = {}, None
        with contextlib.ExitStack() as undo:
            for region in self.regions:
                if not region.is_in_place:
                    region.put_again()
                    undo.callback(region.take_out)
            result = self._forward(*args)
        self._failure = None  # whoever has caught it has gone on
        return result


def _comes_from(error: BaseException | None, cause: BaseException) -> bool:
    while error is not None and error is not cause:
        error = error.__cause__ or error.__context__
    return error is cause


def _held_by(hook: Any, name: str) -> Any:
    hook = without_disable(hook)
    return hook.__closure__[hook.__code__.co_freevars.index(name)].cell_contents


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


def is_checkpointed(hooks: Hooks | None) -> bool:
    """Whether a checkpoint has these hooks, in its forward or where it is repeated."""
    return hooks is not None and checkpoint_of(hooks) is not None


def _repeats_of(frame: Any) -> _AsItRan:
    if type(frame.recompute_fn) is not _AsItRan:
        frame.recompute_fn = _AsItRan(frame.recompute_fn)
    found: _AsItRan = frame.recompute_fn
    return found


def _note(frame: Any, on: object, note: Any) -> None:
    _repeats_of(frame).notes.setdefault(on, []).append(note)


def _next_note(frame: Any, on: object) -> Any:
    return frame.recompute_fn.next_note(on) if type(frame.recompute_fn) is _AsItRan else None


def graphs_run_in(frame: Any) -> list[object]:
    """The graphs that have run in the forward of a checkpoint so far, in their order."""
    return _repeats_of(frame).graphs


def note_call(frame: Any, region: Repeatable, again: Callable[..., Any] | None) -> None:
    """Remember what repeats a call of a region in the forward of a checkpoint, ``None`` if eager does."""
    _note(frame, region, again)
    if again is not None and region not in (regions := _repeats_of(frame).regions):
        regions.append(region)


def repeat_of(frame: Any, region: Repeatable) -> Callable[..., Any] | None:
    """What repeats the call of a region that comes next, ``None`` if eager does."""
    again: Callable[..., Any] | None = _next_note(frame, region)
    return again


def note_run(frame: Any, graph: object, *, by_eager: bool) -> None:
    """Remember what has answered a run of a graph in the forward of a checkpoint."""
    _note(frame, graph, by_eager)
    graphs_run_in(frame).append(graph)


def repeated_by_eager(frame: Any, graph: object) -> bool | None:
    """Whether eager has answered the run that is repeated next; ``None`` if there was none."""
    by_eager: bool | None = _next_note(frame, graph)
    return by_eager


def may_be_repeated(frame: Any) -> bool:
    """Whether a backward may still need what the forward of a checkpoint has saved."""
    return any(holder() is not None for holder in frame.weak_holders)


def forget_saved(frame: Any, since: int) -> None:
    """What the forward of a checkpoint has saved after so many tensors counts no longer."""
    del frame.weak_holders[since:], frame.x_metadatas[since:]


def forget_repeated(hooks: Hooks | None) -> None:
    """What was saved in a repeat counts no longer: it begins anew."""
    assert hooks is not None
    found = checkpoint_of(hooks)
    assert found is not None
    frame, group = found[0], _held_by(hooks[0], _GROUP)
    frame.recomp_counter[group] = 0
    for holder in frame.weak_holders:
        if (held := holder()) is not None:
            held.handles.pop(group, None)
