"""Single steps of a run for its timeline: a few thousand at most, however long the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_SAMPLES = 3000


class StepSample(NamedTuple):
    """One training step."""

    step: int
    """Which step of the run it was, from 1 on."""

    start_s: float
    """When it began: seconds of steps and of the time between them since the first one began."""

    ms: float
    """How long it took, in milliseconds."""

    phase: str
    compiled: bool
    """Whether compiled code ran in it."""

    note: str = ""
    """Why its time is not a usual one; else empty.

    It is ``stalled`` (it compiled), ``recorded`` or ``disturbed``, in a capture ``profiled``.
    """


class _Kind:
    """Steps that are alike, every ``stride``-th of them."""

    __slots__ = ("rows", "seen", "stride")

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []
        self.seen = 0
        self.stride = 1


class StepSamples:
    """Keeps all steps while they are few; later every second, every fourth and so on of a kind.

    A kind is told by phase, compiled or not, end of an accumulation cycle, and note. Only the largest
    kind is thinned: a few steps that compiled stay, however many steady ones come after. Adding a step
    takes well under a microsecond.
    """

    def __init__(self, limit: int = MOST_SAMPLES) -> None:
        self._limit = limit
        self._kinds: dict[tuple[str, bool, bool, str], _Kind] = {}
        self._kept = 0

    def add(self, step: int, start_s: float, seconds: float, kind: tuple[str, bool, bool, str]) -> None:
        """Take in one step; ``kind``: its phase, whether compiled, whether it ends a cycle, its note."""
        steps = self._kinds.get(kind)
        if steps is None:
            steps = self._kinds[kind] = _Kind()
        steps.seen += 1
        if steps.seen % steps.stride:
            return
        steps.rows.append((step, start_s, seconds))
        self._kept += 1
        if self._kept > self._limit:
            self._thin()

    def _thin(self) -> None:
        largest = max(self._kinds.values(), key=lambda kind: len(kind.rows))
        before = len(largest.rows)
        # The later one of each two: those are the ones that the wider stride goes on with.
        largest.rows = largest.rows[1::2]
        largest.stride *= 2
        self._kept -= before - len(largest.rows)

    def samples(self) -> tuple[StepSample, ...]:
        """What is kept, in the order of the steps."""
        found = [
            StepSample(step, round(start_s, 6), round(1e3 * seconds, 4), phase, compiled, note)
            for (phase, compiled, _, note), kind in self._kinds.items()
            for step, start_s, seconds in kind.rows
        ]
        return tuple(sorted(found, key=lambda sample: sample.step))


def json_with_rows(plain: Mapping[str, Any], name: str) -> str:
    """Indented JSON in which the list ``name`` has one line for each row, and comes last."""
    others = json.dumps({k: v for k, v in plain.items() if k != name}, indent=2, allow_nan=False)
    rows = [json.dumps(row, allow_nan=False) for row in plain[name]]
    listed = "\n    " + ",\n    ".join(rows) + "\n  " if rows else ""
    return f"{others[:-2]},\n  {json.dumps(name)}: [{listed}]\n}}\n"
