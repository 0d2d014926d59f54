"""An upper bound on the time that a call may take, where the operating system can interrupt it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_hotcompile.swap.process.interruptible import can_be_interrupted

_AT_ONCE = 1e-6
_SOON_S = 0.05
"""In which a timer of others that ran out meanwhile rings: not amid what has put it back."""

_LOOK_AGAIN_S = 0.005
AGAIN_S = 5.0
"""Something in there may have taken the error for its own."""


class _Reached(BaseException):
    """Thrown into the limited code; no ``Exception``, so that nothing in there takes it for its own."""


class Alarm:
    """Throws an error into what runs once it takes longer than ``seconds``.

    This uses the process's alarm signal, so there is an alarm only in the main thread of a POSIX system;
    elsewhere, and with ``None``, nothing happens. From the limit on it looks every few milliseconds whether
    what runs can be interrupted. Python handles a signal between two of its own instructions: a native call
    that never returns is not interrupted. The handler found there is put back, and a timer that was running
    goes on with the rest of its time, at least at the end.

    Args:
        seconds: the limit.
        error: makes what is thrown.
        again_s: seconds after which it is thrown once more, as long as it is not stopped; 0 for once.
        covers_limits: whether a :func:`time_limit` inside has nothing to add.
        may_throw: asked with the frame that runs whether it can be interrupted.
        now: a clock in seconds.

    Attributes:
        active: whether it would throw; a statement that clears it cannot be interrupted, as a call may be.
        rang: whether it has thrown, since it was started.
    """

    def __init__(
        self,
        seconds: float | None,
        error: Callable[[], BaseException],
        *,
        again_s: float = 0.0,
        covers_limits: bool = False,
        may_throw: Callable[[FrameType | None], bool] = can_be_interrupted,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.active = self.rang = False
        self.covers_limits = covers_limits
        self._seconds = seconds
        self._error = error
        self._again_s = again_s
        self._may_throw = may_throw
        self._now = now
        self._restore: Callable[[], None] | None = None

    def start(self) -> None:
        """From now on the time counts."""
        if self._seconds is None or self._restore is not None or not _can_interrupt():
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        start, rest, interval = self._now(), 0.0, 0.0

        def restore() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if rest:
                left = max(rest - (self._now() - start), _SOON_S)
                signal.setitimer(signal.ITIMER_REAL, left, interval)

        self._restore, self.active, self.rang = restore, True, False
        rest, interval = signal.setitimer(signal.ITIMER_REAL, self._seconds, _LOOK_AGAIN_S)

    def stop(self) -> None:
        """No longer; a second call does nothing. In another thread it is put back by the next call."""
        self.active = False
        if self._restore is None or threading.current_thread() is not threading.main_thread():
            return
        restore, self._restore = self._restore, None
        restore()

    def end_now(self) -> None:
        """As if the time were up; nothing happens where none counts."""
        if self.active:
            signal.setitimer(signal.ITIMER_REAL, _AT_ONCE, _LOOK_AGAIN_S)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if not self.active or not self._may_throw_at(frame):  # the code may have ended in the meantime
            return
        # nothing is thrown into the code that cleans up after the first one
        signal.setitimer(signal.ITIMER_REAL, self._again_s, _LOOK_AGAIN_S if self._again_s else 0.0)
        self.rang = True
        raise self._error()

    def _may_throw_at(self, frame: FrameType | None) -> bool:
        try:
            return self._may_throw(frame)
        except RecursionError:  # of what runs, which has used up nearly all frames that there are
            return False


@contextmanager
def time_limit(seconds: float | None, name: str, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Interrupt the code inside when it takes longer than ``seconds``, see :class:`Alarm`.

    Inside of an alarm that covers this there is no second limit.

    Args:
        seconds: the limit.
        name: what the limit is called in the error.
        now: a clock in seconds.

    Raises:
        TimeoutError: the limit was reached.
    """
    if seconds is None or is_limited():
        yield
        return
    alarm = Alarm(seconds, _Reached, again_s=AGAIN_S, now=now)
    try:
        alarm.start()
        yield
        alarm.active = False
    except _Reached:
        alarm.active = False
        raise TimeoutError(too_long(name, seconds)) from None
    finally:
        alarm.active = False
        alarm.stop()


def too_long(name: str, seconds: float) -> str:
    """What an error says."""
    return f"took longer than {name}={seconds:g} s"


def _can_interrupt() -> bool:
    """Whether there is an alarm, whether it reaches this thread, and whether its handler can be put back."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is not None
    )


def is_limited() -> bool:
    """Whether an alarm is set that covers all limits inside."""
    return (alarm := _in_force()) is not None and alarm.covers_limits


def is_over() -> bool:
    """Whether what runs was told to end: nothing else need be tried in its place."""
    return (alarm := _in_force()) is not None and alarm.rang


def _in_force() -> Alarm | None:
    if not hasattr(signal, "setitimer"):
        return None
    owner = getattr(signal.getsignal(signal.SIGALRM), "__self__", None)
    return owner if isinstance(owner, Alarm) and owner.active else None
