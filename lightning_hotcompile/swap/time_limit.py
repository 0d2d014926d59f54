"""An upper bound on the time that a call may take, where the operating system can interrupt it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_AT_ONCE = 1e-6


class _Reached(BaseException):
    """Thrown into the limited code; no ``Exception``, so that nothing in there takes it for its own."""


@contextmanager
def time_limit(seconds: float | None, name: str, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Interrupt the code inside when it takes longer than ``seconds``.

    This uses the process's alarm signal, so there is a limit only in the main thread of a POSIX system;
    elsewhere, and with ``None``, the code runs as long as it likes. Python handles a signal between two
    of its own instructions: a native call that never returns is not interrupted. The handler found there
    is put back, and a timer that was running goes on with the rest of its time, at least at the end.

    Args:
        seconds: the limit.
        name: what the limit is called in the error.
        now: a clock in seconds.

    Raises:
        TimeoutError: the limit was reached.
    """
    if seconds is None or not _can_interrupt():
        yield
        return
    active = True

    def reached(signum: int, frame: FrameType | None) -> None:
        if active:  # a signal on its way while the code ended comes too late
            raise _Reached

    before = signal.signal(signal.SIGALRM, reached)
    start = now()
    rest, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
        active = False
    except _Reached:
        active = False
        raise TimeoutError(f"took longer than {name}={seconds:g} s") from None
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if rest:
            signal.setitimer(signal.ITIMER_REAL, max(rest - (now() - start), _AT_ONCE), interval)


def _can_interrupt() -> bool:
    """Whether there is an alarm, whether it reaches this thread, and whether its handler can be put back."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is not None
    )
