"""What is known of one step besides its time, and the steps that are compared in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_hotcompile.watch.stats import Ratio, robust_ratio


@dataclass(eq=False, kw_only=True, slots=True)
class StepRecord:
    """What is known of one step besides its time.

    ``ends_unit`` is false for a micro-step after which gradients are accumulated further;
    ``disturbed`` steps (compiled something, were recorded, or hold an odd batch) are not compared, nor are
    those that were ``slowed`` since a child process compiles beside them.
    ``pairs`` is where the time of an interleaved step goes; ``without`` names the part of the plan that is
    left out of it, which then takes the place of eager.
    """

    phase: str
    compiled: bool
    ends_unit: bool = True
    disturbed: bool = False
    stalled: bool = False
    recorded: bool = False
    slowed: bool = False
    pairs: PairedUnits | None = None
    without: str | None = None

    @property
    def is_second_arm(self) -> bool:
        """Whether it is on the right of a pair: compiled, and nothing left out."""
        return self.compiled and self.without is None

    @property
    def kind(self) -> tuple[str, bool, bool, str]:
        """How its sample is filed: phase, compiled, end of a cycle, and why its time is not a usual one."""
        note = ""
        if self.disturbed or self.stalled:
            note = "stalled" if self.stalled else "recorded" if self.recorded else "disturbed"
        return self.phase, self.compiled, self.ends_unit, note


def leave_out_mixed_unit(unit: Sequence[tuple[object, StepRecord]]) -> None:
    """Micro-steps of several signatures in one optimizer step cannot be compared with another unit.

    Args:
        unit: pairs of what tells the signatures apart (by identity) and the step's record.
    """
    if all(signature is unit[0][0] for signature, _ in unit):
        return
    last = {id(signature): record for signature, record in unit}
    for _, record in unit:
        record.disturbed = True
    for record in last.values():
        record.ends_unit = True


class PairedUnits:
    """Times of interleaved eager and compiled units of one signature, in pairs.

    A unit is one optimizer step with all its micro-steps. Two of different kinds, one after the other,
    are a pair, whichever comes first. A disturbed unit takes its partner with it.
    """

    def __init__(self) -> None:
        self.eager: list[float] = []
        self.compiled: list[float] = []
        self._seconds = 0.0
        self._disturbed = False
        self._waiting: tuple[bool, float, bool] | None = None

    def add(self, record: StepRecord, seconds: float) -> None:
        """One micro-step; at the unit's end the sum counts."""
        self._seconds += seconds
        self._disturbed |= record.disturbed
        if record.ends_unit:
            seconds, disturbed = self._seconds, self._disturbed
            self._seconds, self._disturbed = 0.0, False
            self.add_unit(record.is_second_arm, seconds, disturbed)

    def add_unit(self, compiled: bool, seconds: float, disturbed: bool) -> None:
        """One unit that has ended."""
        now = (compiled, seconds, disturbed)
        before = self._waiting
        if before is None or before[0] is compiled:
            self._waiting = now  # one of the same kind before it has lost its partner
            return
        self._waiting = None
        if not (before[2] or now[2]):
            eager, fast = (before, now) if compiled else (now, before)
            self.eager.append(eager[1])
            self.compiled.append(fast[1])

    @property
    def n(self) -> int:
        """Complete pairs."""
        return len(self.compiled)

    @property
    def saves_s(self) -> float:
        """Seconds by which the median of the compiled units is below that of the eager ones."""
        return median(self.eager) - median(self.compiled) if self.n else 0.0

    def ratio(self, confidence: float = 0.95) -> Ratio | None:
        """Eager time / compiled time with its interval, or ``None`` with too few pairs.

        Steps may be heavy in turns, so it is :func:`~lightning_hotcompile.watch.stats.robust_ratio`.
        """
        return robust_ratio(self.eager, self.compiled, confidence)
