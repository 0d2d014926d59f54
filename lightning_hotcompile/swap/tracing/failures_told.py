"""Errors that Dynamo suppresses, out of its log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_hotcompile.swap.own_thread import OwnThread

_log = logging.getLogger(__name__)


class FailuresTold(logging.Filter):
    """Hands on the errors that Dynamo suppresses, and keeps their long warnings off the console.

    What other threads compile is left to them.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._thread = OwnThread()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record goes on to the log."""
        if not self._thread.is_here():
            return True
        if "recompile_limit" in record.getMessage():
            return False  # told by the region that runs eagerly for it
        if "Graph break from `Tensor.item()`" in record.getMessage():
            return False  # a page of advice on Dynamo's settings; graph breaks are in the receipt
        if "Adding a graph break" in record.getMessage():
            return False  # for an operation that no graph can have: likewise
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.WARNING or error is None:
            return True
        self._on_failure(error)
        _log.debug("Dynamo could not compile a frame", exc_info=error)
        return False
