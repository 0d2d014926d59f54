"""Which way a step goes: eager, compiling, or through what is compiled already."""

from __future__ import annotations

import contextlib
import enum

from lightning_hotcompile.swap.dynamic_dims import NOTHING_VARIES
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graph import first_line


class Lane(enum.Enum):
    """How the swapped parts of the model behave during one step."""

    EAGER = "eager"
    """Everything runs as if nothing had been swapped."""

    COMPILE = "compile"
    """Compiled code runs; what is missing may be compiled now, at the price of a stall."""

    REUSE = "reuse"
    """Compiled code runs; what is missing runs eagerly, so that no step stalls."""


class Gate:
    """Opened for a training step and closed after it; outside of a step everything is eager.

    It stays open over the backward pass, since activation checkpointing runs blocks again there
    and has to take the same way as in the forward.
    """

    def __init__(self, *, suppress_errors: bool = True) -> None:
        self.suppresses_errors = suppress_errors
        self.failures: list[str] = []
        """First lines: an error itself would keep the model that it passed through."""

        self.steps = 0
        """That it was opened for."""

        self._context: contextlib.AbstractContextManager[None] | None = None
        self.lane = Lane.EAGER
        self.left_out: frozenset[str] = frozenset()  # regions that run eagerly on any lane
        self.dynamic_dims = NOTHING_VARIES  # in the tensors of this step, for what is compiled in it

    def failed(self, error: BaseException) -> None:
        """Compiling failed, or what was compiled."""
        self.failures.append(first_line(error))

    def takes(self, region: str) -> bool:
        """Whether compiled code of this region is to be used now."""
        return self.lane is not Lane.EAGER and region not in self.left_out

    def open(self, lane: Lane, left_out: frozenset[str] = frozenset()) -> None:
        """Let a step through on this lane; a step that was left open is closed first."""
        if self._context is not None:
            self.close()
        self.left_out = left_out
        self.steps += 1
        if lane is Lane.COMPILE:
            context = compiling_allowed(suppress_errors=self.suppresses_errors, on_failure=self.failed)
            context.__enter__()
            self._context = context
        self.lane = lane

    def close(self) -> None:
        """Back to eager; a second call does nothing."""
        self.lane = Lane.EAGER
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
