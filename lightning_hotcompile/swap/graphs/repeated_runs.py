"""Runs of one graph under the hooks of activation checkpoints: repeated by what answered them in the forward.

Compiled code saves other tensors than eager, and torch holds those of a repeat against those of its forward.
So what answered a run of the forward answers it where it is repeated, whatever has become of the graph since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from lightning_hotcompile.errors import ParityError, first_line
from lightning_hotcompile.swap.dynamo import CompiledFn, StopRecompute, is_seen_by_a_mode
from lightning_hotcompile.swap.graphs.graph import Graph, Watch
from lightning_hotcompile.swap.parity.apart import unseen_by_modes
from lightning_hotcompile.swap.parity.tripwire import Tripwire
from lightning_hotcompile.swap.process.saved_tensors import Hooks, strides_kept
from lightning_hotcompile.swap.repeats import (
    checkpoint_of,
    forget_saved,
    may_be_repeated,
    note_run,
    repeated_by_eager,
)

_NAN = "NaN or Inf"
_WHERE = "where a checkpoint repeats it"


class EagerAnswer:
    """The captured graph where it answers in place of compiled code.

    What code that failed in the same run has left with the checkpoint is forgotten. Where a mode has seen
    its operations (a selective checkpoint, which may keep what they give) nothing can be taken back.
    """

    def __init__(self, captured: CompiledFn) -> None:
        self.captured = captured
        self.runs = 0
        self._frame: Any = None
        self._saved = 0

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs."""
        self.runs += 1
        if self._frame is not None and not is_seen_by_a_mode():
            forget_saved(self._frame, self._saved)
        return self.captured(*args)

    def has_answered(self, frame: Any, answer: CompiledFn, args: tuple[Any, ...]) -> tuple[Any, bool]:
        """What ``answer`` gives in the forward of a checkpoint, and whether it was this."""
        runs = self.runs
        self._frame, self._saved = frame, len(frame.weak_holders)
        try:
            outputs = answer(*args)
        finally:
            self._frame = None
        return outputs, self.runs > runs


class RunsUnderHooks:
    """Runs of one graph while hooks are in use that pack what is saved.

    Args:
        graph: what is known about it.
        watch: shared by all graphs.
        eager: answers in place of its compiled code.
        repeats: gives what runs its compiled code, be it still used or not, and what looks for NaN.
        give_up: told why the code is not to be used again, and of the error.
    """

    def __init__(
        self,
        graph: Graph,
        watch: Watch,
        eager: EagerAnswer,
        repeats: Callable[[], tuple[CompiledFn, Tripwire | None]],
        give_up: Callable[[str, BaseException], object],
    ) -> None:
        self._graph = graph
        self._watch = watch
        self._eager = eager
        self._repeats = repeats
        self._give_up = give_up
        self._frames = weakref.WeakSet[Any]()

    @property
    def is_to_be_repeated(self) -> bool:
        """Whether it has run in the forward of a checkpoint that a backward may still repeat."""
        return any(map(may_be_repeated, self._frames))

    def run(self, hooks: Hooks, answer: CompiledFn, args: tuple[Any, ...]) -> Any:
        """Have ``answer`` answer, or in a repeat what did so in the forward."""
        frame, is_repeated = checkpoint_of(hooks) or (None, False)
        with strides_kept(hooks):
            if frame is None:
                return answer(*args)
            if is_repeated:
                return self._repeated(frame, answer, args)
            runs = self._graph.runs
            outputs, by_eager = self._eager.has_answered(frame, answer, args)
            if self._graph.runs == runs:  # else it was none, see traced_once
                note_run(frame, self, by_eager=by_eager)
                self._frames.add(frame)
            return outputs

    def _repeated(self, frame: Any, answer: CompiledFn, args: tuple[Any, ...]) -> Any:
        by_eager = repeated_by_eager(frame, self)
        if by_eager is None:  # the forward ran another graph, or none
            return answer(*args)
        if by_eager:
            return self._eager(*args)
        try:
            return self._compiled(args)
        except (StopRecompute, CheckpointError):
            raise
        except ParityError as wrong:
            if self._watch.parity != "raise":
                self._failed(frame, f"not right: {_NAN} in run {self._graph.runs}, {_WHERE}", wrong)
            raise
        except Exception as failure:
            if not self._watch.raise_errors:
                reason = f"compiled code raised in run {self._graph.runs}, {_WHERE}: {first_line(failure)}"
                self._failed(frame, reason, failure)
            raise

    def _compiled(self, args: tuple[Any, ...]) -> Any:
        """What eager changes past the last tensor that it saves is kept where torch leaves it there."""
        parity = self._graph.parity
        if parity is None or not parity.late:
            return self._looked_at(args)
        with unseen_by_modes():
            given = [arg.clone() if i in parity.late else arg for i, arg in enumerate(args)]
        outputs = self._looked_at(tuple(given))
        with unseen_by_modes(), torch.no_grad():
            for i in parity.late:
                args[i].copy_(given[i])
        return outputs

    def _looked_at(self, args: tuple[Any, ...]) -> Any:
        """Looked at as in the forward, but where torch leaves it before its end."""
        code, tripwire = self._repeats()
        if tripwire is None or self._graph.unwatched is not None or self._watch.parity == "warn":
            return code(*args)
        if (before := tripwire.before(args)) is None:
            return code(*args)
        try:
            outputs = code(*args)
            if tripwire.finds(outputs, args, before):
                raise ParityError(f"compiled code of {self._graph.region} makes {_NAN} {_WHERE}")
        except StopRecompute:
            raise
        except Exception:
            before.put_back()
            raise
        return outputs

    def _failed(self, frame: Any, reason: str, failure: Exception) -> None:
        """Eager cannot answer: the backward is compiled, and needs what compiled code saves."""
        if self._graph.error is None:
            self._give_up(reason, failure)
        if not is_seen_by_a_mode():  # which would take the next repeat for more of this one
            frame.recompute_fn.failed(self._graph.region, failure)
