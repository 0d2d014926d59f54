"""An end to tracing that goes on and on: a long loop is unrolled, sizes are simplified for minutes."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch._dynamo.callback import CallbackTrigger, callback_handler

from lightning_hotcompile.swap.own_thread import OwnThread
from lightning_hotcompile.swap.process.interruptible import can_be_interrupted
from lightning_hotcompile.swap.process.time_limit import AGAIN_S, Alarm, is_limited, too_long

_DYNAMOS = "torch/_dynamo/convert_frame.py"


class TracingLimit:
    """What Dynamo does with one frame, tracing and backend together, ends after some time with an error.

    Dynamo then runs the frame as the user wrote it. The frames that it calls would be traced next, each for
    as long: until the call that this is around is over, they are refused at once.

    Args:
        seconds: the limit, ``None`` for none; in the main thread of a POSIX system only.

    Attributes:
        reached: that it was reached, or why it was ended before that, in words.
        frames: how many Dynamo has begun to compile, those of other threads' calls left out.
    """

    def __init__(self, seconds: float | None) -> None:
        self._said = "" if seconds is None else too_long("compile_timeout", seconds)
        self.reached: str | None = None
        self.frames = 0
        self._thread = OwnThread()
        self._alarm = Alarm(
            seconds, self._error, again_s=AGAIN_S, covers_limits=True, may_throw=_is_in_dynamo
        )

    def __enter__(self) -> TracingLimit:
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.active = False
        self._alarm.stop()
        for callbacks, own in (
            (callback_handler.start_callbacks, self._on_start),
            (callback_handler.end_callbacks, self._on_end),
        ):
            while own in callbacks:
                callbacks.remove(own)

    def end(self, why: str) -> None:
        """What is compiled now ends where it can be interrupted, and in this call nothing more is begun."""
        self.reached = self._said = why
        self._alarm.end_now()

    def _error(self) -> TimeoutError:
        self.reached = self._said
        return TimeoutError(self._said)

    def _on_start(self, args: Any) -> None:
        if args.callback_trigger is not CallbackTrigger.DYNAMO:
            return  # no frame could be run as the user wrote it
        if not self._thread.is_here():
            return  # another call's, which a frame of this one waits for
        self.frames += 1
        if self.reached:
            raise self._error()
        if not is_limited():  # by the call of another region, which this one is in
            self._alarm.start()

    def _on_end(self, *_: Any) -> None:
        self._alarm.stop()


def _is_in_dynamo(frame: FrameType | None) -> bool:
    """Whether Dynamo is at work on a frame: with several threads its end may be told to another one."""
    if not can_be_interrupted(frame):
        return False
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_DYNAMOS):
            return True
        frame = frame.f_back
    return False
