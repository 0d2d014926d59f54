"""What this package refuses, as one line on the console instead of a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hotcompile.errors import HotCompileError


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """End the program with the message of an error that this package raises on purpose.

    Hydra wraps an error of what it builds in one of its own: that counts as well. All other errors pass
    unchanged, with their traceback.

    Raises:
        SystemExit: with the message; the exit status is then 1. After Ctrl-C without a message; it is then
            130, as shells have it.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        refusal = _unwrapped(error)
        if not isinstance(refusal, HotCompileError):
            raise
        raise SystemExit(str(refusal)) from None


def _unwrapped(error: BaseException | None) -> BaseException | None:
    # Looked up and not imported: Hydra is optional, and where it is not loaded it has wrapped nothing.
    wrapper = getattr(sys.modules.get("hydra.errors"), "InstantiationException", ())
    while isinstance(error, wrapper):
        error = error.__cause__
    return error
