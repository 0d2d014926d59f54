"""How long each step took, without waiting for the accelerator while steps go on."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

MAX_PENDING = 64

DRAINED_TOGETHER = 16
"""Steps that may end before the clock is asked, where nobody has to know yet what they took."""


class TimingEvent(Protocol):
    """What the clock needs of an accelerator's event; ``torch.cuda.Event`` has it."""

    def record(self) -> Any:
        """Mark this moment on the current stream."""

    def query(self) -> bool:
        """Whether the accelerator has passed the mark."""

    def synchronize(self) -> Any:
        """Wait until the accelerator has passed the mark."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to the other one."""


class StepTime(NamedTuple):
    """One finished step."""

    tag: Hashable
    """What the caller gave to ``start``, for example which kind of step it was."""

    seconds: float
    """From ``start`` to ``stop``, on the accelerator's own clock where there is one."""

    wait_seconds: float
    """From the end of the step before to this one's start (data loading), by the same clock; 0.0 for the
    first. On an accelerator that is the time in which it did nothing, or copied a batch."""

    away_seconds: float = 0.0
    """Host time before this step in which something else than such steps went on, as ``leave`` has said."""


@dataclass(kw_only=True, slots=True)
class _Started:
    tag: Hashable
    wait_seconds: float
    away_seconds: float
    at: float
    event: TimingEvent | None
    after: TimingEvent | None
    """The end of the step before."""

    def took(self, seconds: float, wait_seconds: float) -> StepTime:
        return StepTime(
            tag=self.tag, seconds=seconds, wait_seconds=wait_seconds, away_seconds=self.away_seconds
        )


@dataclass(frozen=True, kw_only=True)
class _Pending:
    started: _Started
    begin: TimingEvent
    end: TimingEvent

    @property
    def events(self) -> list[TimingEvent]:
        """All are asked: the step may have ended on another stream than the one it began on."""
        return [event for event in (self.started.after, self.begin, self.end) if event is not None]

    def is_done(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()

    def time(self) -> StepTime | None:
        seconds, after = _seconds(self.begin, self.end), self.started.after
        if seconds is None:
            return None
        wait = None if after is None else _seconds(after, self.begin)
        return self.started.took(seconds, max(0.0, wait or 0.0))


def _seconds(begin: TimingEvent, end: TimingEvent) -> float | None:
    """``None`` where the device has passed both marks at one moment, for which Metal's events raise."""
    try:
        return begin.elapsed_time(end) / 1e3
    except torch.AcceleratorError:
        raise
    except RuntimeError:
        return None


def _default_make_event(device_type: str) -> Callable[[], TimingEvent] | None:
    """The device's own events; ``None`` on the CPU and where there are none: then the host's clock counts."""
    if device_type == "cpu":
        return None
    event_class = getattr(getattr(torch, device_type, None), "Event", None)
    return None if event_class is None else lambda: event_class(enable_timing=True)


class StepClock:
    """Times steps: with the host's clock on the CPU, with pairs of events on an accelerator.

    Events are resolved when the accelerator has passed them, by asking and not by waiting, so that
    the clock adds no synchronization to the loop. At most ``MAX_PENDING`` steps wait for that; beyond it
    the oldest is given up.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or another type that torch knows.
        now: the host's clock, in seconds.
        make_event: gives a new event with timing; by default the device's own.

    Example:
        >>> ticks = iter([0.0, 2.0])
        >>> clock = StepClock(now=lambda: next(ticks))
        >>> clock.start("eager"); clock.stop()
        >>> [(step.tag, step.seconds) for step in clock.drain()]
        [('eager', 2.0)]
    """

    def __init__(
        self,
        device_type: str = "cpu",
        now: Callable[[], float] = time.perf_counter,
        make_event: Callable[[], TimingEvent] | None = None,
    ) -> None:
        self._now = now
        self._make_event = make_event if make_event is not None else _default_make_event(device_type)
        self._finished: deque[StepTime] = deque(maxlen=MAX_PENDING)
        self._pending: deque[_Pending] = deque()
        self._started: _Started | None = None
        self._stopped_at: float | None = None
        self._left_at: float | None = None
        self._ended: TimingEvent | None = None

    def start(self, tag: Hashable) -> None:
        """Begin a step. One that was begun and never stopped is forgotten."""
        event = self._make_event() if self._make_event is not None else None
        at = self._now()
        wait = 0.0 if self._stopped_at is None else at - self._stopped_at
        away = 0.0 if self._left_at is None else at - self._left_at
        self._left_at = None
        if event is not None:
            event.record()
        self._started = _Started(
            tag=tag, wait_seconds=wait, away_seconds=away, at=at, event=event, after=self._ended
        )

    def stop(self) -> None:
        """End the step that was begun; without one, nothing happens."""
        started, self._started = self._started, None
        if started is None:
            return
        if started.event is None or self._make_event is None:
            self._stopped_at = self._now()
            self._finished.append(started.took(self._stopped_at - started.at, started.wait_seconds))
            return
        self._ended = end = self._make_event()
        end.record()
        self._pending.append(_Pending(started=started, begin=started.event, end=end))
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()

    def abandon(self) -> None:
        """Forget the step that was begun, after an exception in it. The next one has no waiting time."""
        self._started = self._stopped_at = self._ended = None

    def leave(self) -> None:
        """Something else goes on until the next step begins, which has no waiting time."""
        self.abandon()
        self._left_at = self._now()

    def drain(self, *, wait: bool = False) -> list[StepTime]:
        """The steps that have finished since the last call, oldest first, each once.

        A step that the accelerator has not passed yet stays for a later call, and so do those after it;
        with ``wait``, for when no step follows, it is waited for, but not while an error is handled (Ctrl-C):
        an accelerator that hangs never passes it.
        After an error of the accelerator, which each call to it would raise again, none of them stays.
        """
        try:
            if wait and sys.exc_info()[0] is None:
                for pending in self._pending:
                    pending.wait()
            if self._pending:
                self._resolve()
        except Exception:
            self._pending.clear()
            raise
        steps = list(self._finished)
        self._finished.clear()
        return steps

    def _resolve(self) -> None:
        while self._pending and self._pending[0].is_done():
            step = self._pending[0].time()
            self._pending.popleft()
            if step is not None:
                self._finished.append(step)
