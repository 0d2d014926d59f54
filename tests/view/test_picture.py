"""The PNG: what is drawn, and that it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")

import numpy as np
from matplotlib.figure import Figure

from lightning_hotcompile.view.from_events import report_from_events
from lightning_hotcompile.view.picture import figure_of, timeline_image, write_timeline
from lightning_hotcompile.view.run import Run, RunError
from lightning_hotcompile.view.timeline import PHASE_COLOURS
from tests.view.examples import captured, events, report, samples

RUN = Run(name="outputs/a", report=report(), events=tuple(events()))
BEFORE = Run(name="before", captured=captured())


def texts(figure: Figure) -> str:
    found = [figure.get_suptitle(), *(t.get_text() for legend in figure.legends for t in legend.get_texts())]
    for ax in figure.axes:
        found += [ax.get_title("left"), ax.get_title("right"), *(t.get_text() for t in ax.texts)]
    return "\n".join(found)


def points(figure: Figure, row: int) -> int:
    return sum(len(c.get_offsets()) for c in figure.axes[row].collections)


def test_each_step_is_a_point() -> None:
    figure = figure_of([RUN])
    assert len(figure.axes) == 1
    assert points(figure, 0) == len(samples())


def test_flip_verdict_stall_and_speed_up_are_named() -> None:
    told = texts(figure_of([RUN]))
    for part in (
        "compiled from here on",
        "faster: 1.47x",
        "step 11 stalled: 3.20 s",
        "1.47x faster (98% interval 1.38 to 1.55)",
        "outputs/a",
        "settling",
        "stalled for the compiler",
    ):
        assert part in told


def test_two_runs_are_before_and_after_on_one_scale() -> None:
    figure = figure_of([BEFORE, RUN])
    assert [points(figure, row) for row in (0, 1)] == [100, len(samples())]
    assert "under the profiler" in texts(figure)
    assert "under the profiler" not in texts(figure_of([RUN]))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    told = texts(figure)
    assert "before: before" in told
    assert "after: outputs/a" in told
    assert "usual step: 28.0 ms (IQR 0.00 ms, 95 steps)\n" in told
    assert ", steady, compiled" in told
    assert "eager, or not known" in told
    assert "not known" not in texts(figure_of([RUN]))
    assert "before / after: 1.4" in told
    assert "two runs, so without an interval" in told


def test_dollar_signs_are_no_formula(tmp_path: Path) -> None:
    name = r"$\frac{1}$ and $x"
    write_timeline([Run(name=name, report=report(), events=tuple(events()))], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_it_is_a_png(tmp_path: Path) -> None:
    write_timeline([BEFORE, RUN], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_as_an_array_it_has_three_channels_and_the_colours_of_the_phases() -> None:
    image = timeline_image([RUN])
    assert (image.ndim, image.shape[2], image.dtype) == (3, 3, np.uint8)
    assert image.shape[0] < image.shape[1]
    steady = [int(PHASE_COLOURS["steady"][i : i + 2], 16) for i in (1, 3, 5)]
    assert (image == steady).all(axis=2).any()


def test_a_run_without_step_times_is_refused_by_name() -> None:
    log = Run(name="events.jsonl", report=report_from_events(events()), events=tuple(events()))
    for runs in ([log], [RUN, log]):
        with pytest.raises(RunError, match=r"RUN='events.jsonl' holds no step times.*: name the folder"):
            figure_of(runs)
