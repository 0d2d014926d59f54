"""Which way a step goes: eager, compiling, or through what is compiled already."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import threading
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.errors import HotCompileError, first_line
from lightning_hotcompile.swap.dynamo import cause_of, compiling_allowed
from lightning_hotcompile.swap.own_thread import runs_backward
from lightning_hotcompile.swap.tracing.breaks import GraphBreak, place_of
from lightning_hotcompile.swap.tracing.dynamic_dims import NOTHING_VARIES


class Lane(enum.Enum):
    """How the swapped parts of the model behave during one step."""

    EAGER = "eager"
    """Everything runs as if nothing had been swapped."""

    COMPILE = "compile"
    """Compiled code runs; what is missing may be compiled now, at the price of a stall."""

    REUSE = "reuse"
    """Compiled code runs; what is missing runs eagerly, so that no step stalls."""


PARTS_OF_A_STEP = frozenset(
    ["training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step"]
)
"""What Lightning may be running when compiled code is used; between these it calls hooks."""


def _nothing_is_known() -> None:
    return None


class Gate:
    """Opened for a training step and closed after it; outside of a step everything is eager.

    It stays open over the backward pass, since activation checkpointing runs blocks again there
    and has to take the same way as in the forward. Callbacks before and after ours are called while it is
    open, and so are hooks within the step: what these do with the model is no part of the step. A backward
    pass is, whoever has started it.

    Args:
        suppress_errors: whether eager answers where compiling fails.
        running: the name of what Lightning is running, ``None`` if that is not known.
        limit_s: seconds that one frame may take to be compiled, ``None`` for no limit.
    """

    def __init__(
        self,
        *,
        suppress_errors: bool = True,
        running: Callable[[], str | None] = _nothing_is_known,
        limit_s: float | None = None,
    ) -> None:
        self.suppresses_errors = suppress_errors
        self.limit_s = limit_s
        self._running = running
        self.failures: list[str] = []
        """First lines: an error itself would keep the model that it passed through."""

        self.failed_at: dict[str, list[str]] = {}
        """By failure: the user's lines that Dynamo was at, if it was at any."""

        self._breaks: dict[tuple[str, str], GraphBreak] = {}

        self.steps = 0
        """That it was opened for."""

        self._context: contextlib.AbstractContextManager[None] | None = None
        self._opened_in: tuple[int, contextvars.Context] | None = None
        """The thread that may compile in this step, and the settings of the compiler there."""

        self.lane = Lane.EAGER
        self.left_out: frozenset[str] = frozenset()  # regions that run eagerly on any lane
        self.dynamic_dims = NOTHING_VARIES  # in the tensors of this step, for what is compiled in it

    def failed(self, error: BaseException) -> None:
        """Compiling failed, or what was compiled."""
        cause = cause_of(error)
        said = str(cause.__context__).partition("\n")[0]
        # Dynamo has its own error around one of this package, which is a sentence already.
        is_ours = isinstance(cause.__context__, HotCompileError) and said in str(cause)
        self.failures.append(said if is_ours else first_line(cause))
        place, known = place_of(error), self.failed_at.setdefault(self.failures[-1], [])
        if place and place not in known:
            known.append(place)

    @property
    def breaks(self) -> tuple[GraphBreak, ...]:
        """Where Dynamo has ended a graph before its function did, each place once."""
        return tuple(self._breaks.values())

    def _broke(self, found: GraphBreak) -> None:
        """Dynamo may begin anew and come by once more, to find that it loses the function."""
        key = found.place, found.reason
        if found.loses_function or key not in self._breaks:
            self._breaks[key] = found

    def takes(self, region: str) -> bool:
        """Whether compiled code of this region is to be used now."""
        if self.lane is Lane.EAGER or region in self.left_out:
            return False
        running = self._running()
        if running is None or running in PARTS_OF_A_STEP:
            return True
        return runs_backward()

    def open(self, lane: Lane, left_out: frozenset[str] = frozenset()) -> None:
        """Let a step through on this lane; a step that was left open is closed first."""
        if self._context is not None:
            self.close()
        self.left_out = left_out
        self.steps += 1
        if lane is Lane.COMPILE:
            context = compiling_allowed(
                suppress_errors=self.suppresses_errors,
                on_failure=self.failed,
                on_break=self._broke,
            )
            context.__enter__()
            self._context = context
            self._opened_in = threading.get_ident(), contextvars.copy_context()
        self.lane = lane

    def close(self) -> None:
        """Back to eager; a second call does nothing."""
        self.lane = Lane.EAGER
        self.dynamic_dims = NOTHING_VARIES  # it has tensors of the batch, and Dynamo keeps gates for long
        context, self._context = self._context, None
        self._opened_in = None
        if context is not None:
            context.__exit__(None, None, None)

    def as_opened(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what may compile, with the compiler's settings of the thread that has opened this step.

        Since torch 2.13 a thread has settings of its own, and the backward pass of an accelerator has a
        thread of its own. There a block under a reentrant activation checkpoint is first called with
        gradients.
        """
        thread, settings = self._opened_in or (None, None)
        if settings is None or thread == threading.get_ident():
            return function(*args, **kwargs)
        return settings.copy().run(function, *args, **kwargs)
