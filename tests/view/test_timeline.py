"""What a picture shows: bands, marks, the axis, and where everything goes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.receipt.event_kinds import Reverted
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.chart import WIDTH, chart_of, interval_of, nice_ticks
from lightning_hotcompile.view.from_events import report_from_events
from lightning_hotcompile.view.run import Run
from lightning_hotcompile.view.timeline import (
    PHASE_COLOURS,
    Band,
    bands_of,
    colour_of,
    round_up,
    timeline_of,
    typical,
)
from lightning_hotcompile.watch.stats import Ratio
from tests.view.examples import captured, events, report, samples

RUN = Run(name="a", report=report(), events=tuple(events()))
LINE = timeline_of(RUN)


def band(phase: str, first: int, last: int) -> Band:
    return Band(phase=phase, first=first, last=last)


def test_each_phase_has_a_colour_of_its_own() -> None:
    assert set(PHASE_COLOURS) == {str(phase) for phase in Phase}
    assert len({colour_of(phase) for phase in [*PHASE_COLOURS, "training"]}) == len(PHASE_COLOURS) + 1


def test_bands_are_the_stretches_of_one_phase() -> None:
    assert LINE.bands == (
        band("observing", 1, 10),
        band("flipping", 11, 11),
        band("settling", 12, 31),
        band("steady", 32, 320),
    )
    assert LINE.phases == ("observing", "flipping", "settling", "steady")


def test_odd_steps_inside_of_a_stretch_do_not_part_it() -> None:
    steps = [(n, "observing" if n in (12, 24, 36) else "steady") for n in range(1, 37)]
    assert bands_of(steps) == (band("steady", 1, 35), band("observing", 36, 36))
    assert bands_of([]) == ()


def test_flip_and_verdict_are_marked() -> None:
    assert [(m.step, m.kind, m.label) for m in LINE.marks] == [
        (10, "flip", "compiled from here on"),
        (31, "verdict", "faster: 1.47x"),
    ]


def test_without_a_measurement_the_decision_is_the_verdict() -> None:
    told = (*events()[:5], Reverted(step=12, time=1.0, reason="wrong"))
    marks = timeline_of(Run(name="a", report=report(), events=told)).marks
    assert [(m.step, m.label) for m in marks if m.kind == "verdict"] == [(12, "back to eager")]


def test_a_stall_does_not_flatten_the_other_steps() -> None:
    assert [s.step for s in LINE.stalls] == [11]
    assert 28 < LINE.ceiling_ms < 60


@pytest.mark.parametrize("ms", [0.0, 1e-6, 3.0, 1e9])
def test_any_time_has_an_axis(ms: float) -> None:
    one = replace(report(), samples=(StepSample(1, 0.0, ms, "observing", False),))
    line = timeline_of(Run(name="a", report=one))
    assert line.ceiling_ms > 0
    (dot,) = chart_of(line).dots
    assert math.isfinite(dot.x)
    assert chart_of(line).top <= dot.y <= chart_of(line).bottom


def test_an_event_log_has_bands_without_steps() -> None:
    line = timeline_of(Run(name="a", report=report_from_events(events()), events=tuple(events())))
    assert line.samples == ()
    assert [b.phase for b in line.bands] == ["observing", "flipping", "settling", "steady"]
    assert [b.first for b in line.bands] == [1, 11, 12, 32]


def test_nothing_has_no_band() -> None:
    assert timeline_of(Run(name="a")).bands == ()


class TestTypical:
    def test_it_is_of_the_last_phase(self) -> None:
        found = typical(RUN)
        assert found is not None
        assert found.n == 289
        assert 19 < found.median < 21

    def test_a_kind_of_step_beside_the_main_one_does_not_count(self) -> None:
        """Each fortieth step, the last of them all too, is a short batch that stays eager."""
        short = {s.step: s._replace(phase="declined", ms=3.0) for s in samples() if s.step % 40 == 0}
        mixed = tuple(short.get(s.step, s) for s in samples())
        found = typical(Run(name="a", report=report(samples=mixed)))
        assert found is not None
        assert 19 < found.median < 21

    def test_a_phase_that_came_back_is_the_last_one(self) -> None:
        """Taken back in between, for 50 steps."""
        mixed = tuple(s._replace(phase="reverted", ms=28.0) if 100 < s.step <= 150 else s for s in samples())
        found = typical(Run(name="a", report=report(samples=mixed)))
        assert found is not None
        assert 19 < found.median < 21

    def test_without_steps_in_the_phase_of_the_report_it_is_of_the_last_long_one(self) -> None:
        """Decided again and again, and stopped in a change."""
        phases = {**dict.fromkeys(range(41, 61), "reverted"), **dict.fromkeys(range(80, 83), "flipping")}
        mixed = tuple(s._replace(phase=phases.get(s.step, s.phase)) for s in samples(82))
        found = typical(Run(name="a", report=report(phase="flipping", samples=mixed)))
        assert found is not None
        assert found.n == 82 - 31 - 20 - 3

    def test_profiled_steps_do_not_count(self) -> None:
        found = typical(Run(name="b", captured=captured()))
        assert found is not None
        assert (found.n, found.median) == (95, 28.0)

    def test_nothing_is_none(self) -> None:
        assert typical(Run(name="a", report=report(samples=()))) is None


class TestChart:
    def test_each_step_is_within_the_plot(self) -> None:
        chart = chart_of(LINE)
        assert len(chart.dots) == len(samples())
        assert all(chart.left <= d.x <= chart.right and chart.top <= d.y <= chart.bottom for d in chart.dots)
        assert [d.x for d in chart.dots] == sorted(d.x for d in chart.dots)

    def test_a_longer_step_is_higher(self) -> None:
        by_step = dict(zip((s.step for s in samples()), chart_of(LINE).dots, strict=True))
        assert by_step[1].y < by_step[100].y
        assert by_step[11].y == chart_of(LINE).top
        assert by_step[11].label == "step 11 stalled: 3.20 s"

    def test_stripes_leave_no_gap(self) -> None:
        stripes = chart_of(LINE).stripes
        assert stripes[0].x == chart_of(LINE).left
        for one, following in itertools.pairwise(stripes):
            assert one.x + one.width == pytest.approx(following.x, abs=0.02)
        assert stripes[-1].x + stripes[-1].width == pytest.approx(chart_of(LINE).right, abs=0.02)

    def test_labels_do_not_lie_on_each_other(self) -> None:
        heights = [line.label_y for line in chart_of(LINE).lines if line.label]
        assert len(set(heights)) == len(heights) == 2
        assert max(heights) < chart_of(LINE).top

    @pytest.mark.parametrize(
        "ratio",
        [
            Ratio(value=1.5, low=1.2, high=1.7, n=9, confidence=0.98),
            Ratio(value=0.5, low=0.4, high=0.6, n=9, confidence=0.98),
            Ratio(value=1.0, low=1.0, high=1.0, n=9, confidence=0.98),
            Ratio(value=90.0, low=3.0, high=200.0, n=9, confidence=0.98),
        ],
    )
    def test_an_interval_holds_its_value_and_shows_1x(self, ratio: Ratio) -> None:
        drawn = interval_of(ratio)
        assert drawn is not None
        assert 0 <= drawn.low <= drawn.value <= drawn.high <= WIDTH / 2
        assert 0 <= drawn.one <= WIDTH / 2
        assert (drawn.one < drawn.low) is (ratio.low > 1)
        assert drawn.ticks

    def test_what_was_not_measured_is_not_drawn(self) -> None:
        assert interval_of(None) is None
        assert interval_of(Ratio(value=1.0, low=math.nan, high=2.0, n=1, confidence=0.98)) is None


@pytest.mark.parametrize(("low", "high"), [(0, 12), (0, 0.003), (0.5, 5500.5), (0, 1e7), (0.9, 1.1)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(len(f"{tick:g}") <= 6 for tick in ticks)


@pytest.mark.parametrize("value", [1e-9, 0.7, 1.0, 11.0, 99.0, 12345.0])
def test_rounding_up_is_never_down_nor_far(value: float) -> None:
    assert value <= round_up(value) <= 1.4 * value


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_cannot_be_rounded_up_is_one(value: float) -> None:
    assert round_up(value) == 1.0
