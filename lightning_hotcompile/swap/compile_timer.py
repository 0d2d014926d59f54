"""How long Dynamo compiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch._dynamo.callback import callback_handler

from lightning_hotcompile.swap.own_thread import OwnThread


class CompileTimer:
    """Adds up the wall time in which Dynamo compiles, tracing and backend together, in seconds.

    Dynamo tells of all in the process; what threads compile that are no business of the one that has started
    this is not counted.

    Args:
        now: a clock in seconds.
        counts: whether a compile that begins now is to be counted.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, counts: Callable[[], bool] = lambda: True
    ) -> None:
        self._now = now
        self._counts = counts
        self._thread = OwnThread()
        self._since: float | None = None
        self.seconds = 0.0

    def start(self) -> None:
        """Begin to listen, for this thread; again where ``torch._dynamo.reset()`` has put an end to it."""
        self._thread = OwnThread()
        for callbacks, own in self._places():
            if own not in callbacks:
                callbacks.append(own)

    def stop(self) -> None:
        """Stop listening; a second call does nothing."""
        for callbacks, own in self._places():
            if own in callbacks:
                callbacks.remove(own)
        self._since = None

    def _places(self) -> tuple[tuple[list[Callable[..., None]], Callable[..., None]], ...]:
        return (
            (callback_handler.start_callbacks, self._on_start),
            (callback_handler.end_callbacks, self._on_end),
        )

    def _on_start(self, *_: Any) -> None:
        if self._thread.is_here() and self._counts():
            self._since = self._now()

    def _on_end(self, *_: Any) -> None:
        if self._since is not None:
            self.seconds += self._now() - self._since
            self._since = None
