"""Errors of this package, or of what it asks the model: each is told in a warning, and training goes on."""

from __future__ import annotations

import logging

from lightning_hotcompile.errors import first_line, warn

_log = logging.getLogger(__name__)

_HOOK_IS_CALLED = 5
"""Levels from here to where Lightning calls the hook, past who has caught the error, and past the hook."""


def tell_of(error: Exception) -> str:
    """Warn of an error while it is handled; its traceback goes to the log.

    Returns:
        What was said, for the report.
    """
    _log.debug("HotCompile failed", exc_info=True)
    note = f"HotCompile switched itself off after an error of its own: {first_line(error)}"
    warn(f"{note}. Training goes on eagerly.", stacklevel=_HOOK_IS_CALLED)
    return note
