"""What a picture of a run shows, whatever draws it: steps, bands of phases, stalls and marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.event_kinds import (
    Compiling,
    Declined,
    Event,
    PhaseChanged,
    Reverted,
    SpeedUp,
)
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.run import Run
from lightning_hotcompile.watch.stats import Summary, summarize

PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "observing": "#6f7d8c",
        "prewarming": "#cc79a7",
        "flipping": "#e69f00",
        "settling": "#56b4e9",
        "refining": "#8b6fd1",
        "steady": "#009e73",
        "declined": "#9c8f6b",
        "reverted": "#d55e00",
    }
)
"""Told apart also by most who do not see all colours."""

OTHER_COLOUR = "#0072b2"
"""Of steps without a phase, as those of a captured script."""

_SHORT = 3  # steps; what is shorter between two stretches of one phase makes no band of its own


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of steps in one phase, both ends included."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment worth a line: the change to compiled code, or the verdict on it."""

    step: int
    kind: str
    """``flip`` or ``verdict``."""

    label: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A run laid out by steps."""

    samples: tuple[StepSample, ...]
    bands: tuple[Band, ...]
    marks: tuple[Mark, ...]

    @property
    def stalls(self) -> tuple[StepSample, ...]:
        """The steps that compiled."""
        return tuple(s for s in self.samples if s.note == "stalled")

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in order of first use."""
        found = [s.phase for s in self.samples] or [band.phase for band in self.bands]
        return tuple(dict.fromkeys(found))

    @property
    def first(self) -> int:
        """The first step that is shown."""
        return min([s.step for s in self.samples[:1]] + [b.first for b in self.bands], default=0)

    @property
    def last(self) -> int:
        """The last step that is shown."""
        ends = [s.step for s in self.samples[-1:]] + [b.last for b in self.bands]
        return max(ends + [m.step for m in self.marks], default=0)

    @property
    def ceiling_ms(self) -> float:
        """Where the axis of times ends: above nearly all steps, below a stall that would flatten the rest."""
        usual = sorted(s.ms for s in self.samples if not s.note) or sorted(s.ms for s in self.samples)
        if not usual:
            return 1.0
        high, middle = usual[math.ceil(0.98 * len(usual)) - 1], usual[len(usual) // 2]
        return round_up(1.15 * min(max(high, 1.5 * middle), 6 * middle) or usual[-1] or 1.0)


def timeline_of(run: Run) -> Timeline:
    """The timeline of a run; without samples there are bands and marks only."""
    samples = run.samples
    bands = bands_of([(s.step, s.phase) for s in samples]) if samples else _bands_of_events(run.events)
    return Timeline(samples=samples, bands=bands, marks=tuple(_marks(run.events)))


def typical(run: Run) -> Summary | None:
    """The step time that a run came to: that of its :func:`usual_steps`, in milliseconds."""
    steps = usual_steps(run)
    return summarize([s.ms for s in steps]) if steps else None


def usual_steps(run: Run) -> list[StepSample]:
    """The steps in the phase that the report is in, without those whose time is not a usual one.

    Where these are few, or there is no report: those in the last phase of some length. Each kind of step has
    a phase of its own, the report that of the main one.
    """
    usual = [s for s in run.samples if not s.note] or list(run.samples)
    phases = [run.report.phase] if run.report is not None else []
    for phase in dict.fromkeys([*phases, *(s.phase for s in reversed(usual))]):
        found = [s for s in usual if s.phase == phase]
        if len(found) >= min(5, len(usual)):
            return found
    return usual


def arm_of(sample: StepSample) -> str:
    """``compiled`` or ``eager``; empty where nobody watched, as in a captured script without HotCompile."""
    if sample.compiled:
        return "compiled"
    return "eager" if sample.phase in PHASE_COLOURS else ""


def ring_label(timelines: Iterable[Timeline]) -> str:
    """What a ring stands for: a step that ran eagerly, or of which it is not known."""
    known = all(arm_of(sample) for timeline in timelines for sample in timeline.samples)
    return "eager" if known else "eager, or not known"


def bands_of(steps: Sequence[tuple[int, str]]) -> tuple[Band, ...]:
    """The stretches of one phase; a few odd steps inside of a stretch (a short last batch) do not part it."""
    bands: list[Band] = []
    for band in _stretches(steps):
        if len(bands) > 1 and band.phase == bands[-2].phase and _length(bands[-1]) < _SHORT <= _length(band):
            bands[-2:] = [Band(phase=band.phase, first=bands[-2].first, last=band.last)]
        else:
            bands.append(band)
    return tuple(bands)


def round_up(value: float) -> float:
    """The next number of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten.

    >>> round_up(0.0), round_up(11.0), round_up(47.0), round_up(81.0)
    (1.0, 12.0, 50.0, 100.0)
    """
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12) if n * power >= value)


def colour_of(phase: str) -> str:
    """The colour of a phase."""
    return PHASE_COLOURS.get(phase, OTHER_COLOUR)


def _length(band: Band) -> int:
    return band.last - band.first + 1


def _stretches(steps: Sequence[tuple[int, str]]) -> list[Band]:
    found: list[Band] = []
    for step, phase in steps:
        if found and found[-1].phase == phase:
            found[-1] = Band(phase=phase, first=found[-1].first, last=step)
        else:
            found.append(Band(phase=phase, first=step, last=step))
    return found


def _bands_of_events(events: Sequence[Event]) -> tuple[Band, ...]:
    if not events:
        return ()
    changes = [(0, "observing"), *((e.step, e.phase) for e in events if isinstance(e, PhaseChanged))]
    ends = [*(step for step, _ in changes[1:]), max(e.step for e in events)]
    return tuple(
        Band(phase=phase, first=step + 1, last=max(end, step + 1))
        for (step, phase), end in zip(changes, ends, strict=True)
        if end > step or phase != "observing"
    )


def _marks(events: Sequence[Event]) -> list[Mark]:
    flips = [
        Mark(step=e.step, kind="flip", label="compiled from here on")
        for e in events
        if isinstance(e, Compiling)
    ]
    # The speed-up is the verdict; where it was not measured, the decision is.
    kinds = (SpeedUp,) if any(isinstance(e, SpeedUp) for e in events) else (Declined, Reverted)
    verdicts = [Mark(step=e.step, kind="verdict", label=_verdict(e)) for e in events if isinstance(e, kinds)]
    return [*flips, *verdicts]


def _verdict(event: Event) -> str:
    if isinstance(event, SpeedUp):
        return f"{event.verdict}: {wording.number(event.value, '.2f', 'x')}"
    return "stays eager" if isinstance(event, Declined) else "back to eager"
