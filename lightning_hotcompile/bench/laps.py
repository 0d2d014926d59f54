"""Times the parts of one step, with the device waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class LapClock(Protocol):
    """``start()``, ``lap(name)`` after each part, then ``stop()``."""

    def start(self) -> None:
        """Begin a step."""

    def lap(self, name: str) -> None:
        """A part is over."""

    def stop(self) -> dict[str, float]:
        """Seconds of each part."""


class HostLaps:
    """For the CPU, where a call returns when its work is done."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._marks: list[tuple[str, float]] = []
        self._begin = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._marks = []
        self._begin = self._now()

    def lap(self, name: str) -> None:
        """A part is over."""
        self._marks.append((name, self._now()))

    def stop(self) -> dict[str, float]:
        """Seconds of each part."""
        begins = [self._begin, *(at for _, at in self._marks)]
        return {name: at - begin for (name, at), begin in zip(self._marks, begins, strict=False)}


class CudaLaps:
    """Events between the parts, and one wait before and after: the parts run as close as in training.

    The device is idle when the first event is recorded, so time that the host takes to launch counts.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Wait for what was before, and begin a step."""
        torch.cuda.synchronize()
        self._marks = [("", self._event())]

    def lap(self, name: str) -> None:
        """A part was sent to the device."""
        self._marks.append((name, self._event()))

    def stop(self) -> dict[str, float]:
        """Wait for the device; seconds of each part."""
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: begin.elapsed_time(end) / 1e3 for (_, begin), (name, end) in pairs}

    @staticmethod
    def _event() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def clock_for(device: str) -> LapClock:
    """The clock of a device: the host's, or the GPU's events."""
    return CudaLaps() if device.startswith("cuda") else HostLaps()
