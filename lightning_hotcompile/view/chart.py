"""Where everything goes in the pictures of the HTML page; coordinates are those of the SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.timeline import Mark, Timeline, arm_of, colour_of
from lightning_hotcompile.watch.stats import Ratio

WIDTH = 960
_LEFT, _RIGHT, _BOTTOM, _PLOT = 64, 20, 46, 250
_ROW = 17  # height of a label above the plot
_NOTES = {
    "stalled": "stalled for the compiler",
    "recorded": "its operations were recorded",
    "disturbed": "not compared with others",
    "profiled": "under the profiler",
}


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A line of the grid."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One step: a filled dot if it ran compiled code, a ring if not, a triangle if it stalled."""

    x: float
    y: float
    colour: str
    compiled: bool
    stalled: bool
    label: str
    """Of a stall; empty for others."""

    title: str


@dataclass(frozen=True, kw_only=True)
class Stripe:
    """The band of a phase."""

    x: float
    width: float
    colour: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A moment, with its label above the plot."""

    x: float
    label_y: float
    anchor: str
    kind: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The timeline, laid out."""

    height: float
    left: float
    right: float
    top: float
    bottom: float
    stripes: tuple[Stripe, ...]
    dots: tuple[Dot, ...]
    lines: tuple[Line, ...]
    steps: tuple[Tick, ...]
    times: tuple[Tick, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A speed-up on a line of its own."""

    one: float
    low: float
    high: float
    value: float
    verdict: str
    ticks: tuple[Tick, ...]


class _Scale:
    """Steps to the right, milliseconds upwards."""

    def __init__(self, timeline: Timeline, top: float) -> None:
        self.first, self.last = timeline.first - 0.5, timeline.last + 0.5
        self.ceiling = timeline.ceiling_ms
        self.top = top

    def x(self, step: float) -> float:
        share = (step - self.first) / max(1.0, self.last - self.first)
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * share, 2)

    def y(self, ms: float) -> float:
        share = min(1.0, max(0.0, ms / self.ceiling))
        return round(self.top + _PLOT * (1 - share), 2)


def chart_of(timeline: Timeline) -> Chart:
    """Lay a timeline out."""
    stalled = any(s.ms > timeline.ceiling_ms for s in timeline.stalls)
    top = 12.0 + _ROW * (len(timeline.marks[:4]) + stalled)
    scale = _Scale(timeline, top)
    return Chart(
        height=top + _PLOT + _BOTTOM,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=top,
        bottom=top + _PLOT,
        stripes=tuple(
            Stripe(
                x=scale.x(band.first - 0.5),
                width=round(scale.x(band.last + 0.5) - scale.x(band.first - 0.5), 2),
                colour=colour_of(band.phase),
                phase=band.phase,
            )
            for band in timeline.bands
        ),
        dots=tuple(_dots(timeline, scale)),
        lines=tuple(_line(mark, row, scale) for row, mark in enumerate(timeline.marks)),
        steps=tuple(
            Tick(at=scale.x(n), label=f"{n:g}") for n in nice_ticks(scale.first, scale.last, whole=True)
        ),
        times=tuple(Tick(at=scale.y(n), label=f"{n:g}") for n in nice_ticks(0.0, scale.ceiling)),
    )


def interval_of(ratio: Ratio | None) -> Interval | None:
    """A speed-up laid out, or None if it was not measured."""
    if ratio is None or not all(map(math.isfinite, (ratio.value, ratio.low, ratio.high))):
        return None
    low, high = min(ratio.low, 1.0), max(ratio.high, 1.0)
    room = max(0.15 * (high - low), 0.02)
    start, end = max(0.0, low - room), high + room

    def x(value: float) -> float:
        return round(20 + (WIDTH / 2 - 40) * (value - start) / (end - start), 2)

    ticks = tuple(Tick(at=x(n), label=f"{n:g}x") for n in nice_ticks(start, end, about=4))
    ends = {"low": x(ratio.low), "high": x(ratio.high), "value": x(ratio.value)}
    return Interval(one=x(1.0), verdict=ratio.verdict, ticks=ticks, **ends)


def nice_ticks(low: float, high: float, *, about: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from low to high, roughly so many.

    >>> nice_ticks(0.0, 12.0), nice_ticks(0.5, 3.5, whole=True)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [1.0, 2.0, 3.0])
    """
    width = _nice((high - low) / about)
    width = max(1.0, float(round(width))) if whole else width
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [round(number * width, 10) for number in range(first, last + 1)]


def _nice(width: float) -> float:
    power = 10.0 ** math.floor(math.log10(width))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= width * (1 - 1e-9))


def _dots(timeline: Timeline, scale: _Scale) -> Iterator[Dot]:
    labelled = max(timeline.stalls, key=lambda s: s.ms, default=None)
    for sample in timeline.samples:
        stalled = sample.note == "stalled"
        shown = sample is labelled and sample.ms > scale.ceiling
        yield Dot(
            x=scale.x(sample.step),
            y=scale.y(sample.ms),
            colour=colour_of(sample.phase),
            compiled=sample.compiled,
            stalled=stalled,
            label=f"step {sample.step} stalled: {wording.seconds(sample.ms / 1e3)}" if shown else "",
            title=_title(sample),
        )


def _title(sample: StepSample) -> str:
    facts = (sample.phase, arm_of(sample), _NOTES.get(sample.note, sample.note))
    return f"step {sample.step}: {', '.join([wording.milliseconds(sample.ms), *filter(None, facts)])}"


def _line(mark: Mark, row: int, scale: _Scale) -> Line:
    x = scale.x(mark.step + 0.5)
    return Line(
        x=x,
        label_y=14.0 + _ROW * min(row, 3),
        anchor="end" if x > 0.7 * WIDTH else "start",
        kind=mark.kind,
        label=f"after step {mark.step}: {mark.label}" if row < 4 else "",
    )
