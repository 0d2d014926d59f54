"""What is known of one step besides its time, and the steps that are compared in pairs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hotcompile.watch.stats import Ratio, robust_ratio


@dataclass(eq=False, kw_only=True, slots=True)
class StepRecord:
    """What is known of one step besides its time.

    ``ends_unit`` is false for a micro-step after which gradients are accumulated further, and all of one
    optimizer step have the same ``unit``;
    ``disturbed`` steps (compiled something, were recorded, or hold an odd batch) are not compared, nor are
    those that were ``slowed`` since a child process compiles beside them.
    ``pairs`` is where the time of an interleaved step goes; ``without`` names the part of the plan that is
    left out of it, which then takes the place of eager.
    """

    phase: str
    compiled: bool
    ends_unit: bool = True
    unit: int = 0
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


@dataclass(kw_only=True)
class _Unit:
    """What a unit has had so far of the steps that are compared."""

    number: int
    batches: int = 0
    seconds: float = 0.0
    disturbed: bool = False
    is_second_arm: bool = False


class PairedUnits:
    """Times of interleaved eager and compiled units of one signature, in pairs.

    A unit is one optimizer step with all its micro-steps. It counts with what those of this signature took,
    on average; those of others are none of its business. Two of different kinds, one after the other, are a
    pair, whichever comes first, if they are alike: the last unit of an epoch may have fewer micro-steps, and
    the one that ends a unit has the optimizer's step in it. A disturbed unit takes its partner with it.
    """

    def __init__(self) -> None:
        self.eager: list[float] = []
        self.compiled: list[float] = []
        self._unit: _Unit | None = None
        self._waiting: dict[tuple[int, bool], tuple[bool, float, bool]] = {}

    def add(self, record: StepRecord, seconds: float) -> None:
        """One micro-step. Its unit counts once it is whole: at its end, or when the next begins."""
        unit = self._unit
        if unit is not None and unit.number != record.unit:
            self._add_whole(unit, has_end=False)  # a step of another signature has ended it
            unit = None
        self._unit = unit = unit or _Unit(number=record.unit)
        unit.batches += 1
        unit.seconds += seconds
        unit.disturbed |= record.disturbed
        unit.is_second_arm = record.is_second_arm
        if record.ends_unit:
            self._unit = None
            self._add_whole(unit, has_end=True)

    def _add_whole(self, unit: _Unit, *, has_end: bool) -> None:
        like = (unit.batches, has_end)
        self.add_unit(unit.is_second_arm, unit.seconds / unit.batches, unit.disturbed, like=like)

    def add_unit(
        self, compiled: bool, seconds: float, disturbed: bool, *, like: tuple[int, bool] = (1, True)
    ) -> None:
        """One unit that has ended.

        Args:
            compiled: which of the two kinds it is.
            seconds: what a batch took in it.
            disturbed: whether it is no measure.
            like: what its partner has to be like: how many steps, and whether one of them ended it.
        """
        now, before = (compiled, seconds, disturbed), self._waiting.get(like)
        if before is None or before[0] is compiled:
            self._waiting[like] = now  # one of the same kind before it has lost its partner
            return
        del self._waiting[like]
        if not (before[2] or now[2]):
            eager, fast = (before, now) if compiled else (now, before)
            self.eager.append(eager[1])
            self.compiled.append(fast[1])

    @property
    def n(self) -> int:
        """Complete pairs."""
        return len(self.compiled)

    def ratio(self, confidence: float = 0.95) -> Ratio | None:
        """Eager time / compiled time with its interval, or ``None`` with too few pairs.

        Steps may be heavy in turns, so it is :func:`~lightning_hotcompile.watch.stats.robust_ratio`.
        """
        return robust_ratio(self.eager, self.compiled, confidence)
