"""The timeline as a PNG: one run, or two as before and after on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.run import Run, RunError
from lightning_hotcompile.view.timeline import (
    Timeline,
    arm_of,
    colour_of,
    ring_label,
    timeline_of,
    typical,
    usual_steps,
)

_MOST_LABELS = 8  # in one line of the legend
_ARMS = ("before", "after")
_GREY = "#555b61"
_SPECIAL = ("stalled", "profiled")
_HALO = [Stroke(linewidth=3, foreground="white"), Normal()]


def write_timeline(runs: Sequence[Run], file: Path) -> None:
    """Draw one run, or two below each other.

    Raises:
        RunError: a run holds no step times.
        OSError: the file cannot be written.
    """
    figure_of(runs).savefig(file, dpi=150)


def timeline_image(runs: Sequence[Run]) -> npt.NDArray[np.uint8]:
    """The picture as an array of shape (height, width, 3), for loggers that take one.

    Raises:
        RunError: a run holds no step times.
    """
    canvas = FigureCanvasAgg(figure_of(runs))
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call]
    return np.array(pixels, dtype=np.uint8)[..., :3]


def figure_of(runs: Sequence[Run]) -> Figure:
    """The figure; the axes of the runs have one scale of milliseconds.

    Raises:
        RunError: a run holds no step times.
    """
    timelines = [timeline_of(run) for run in runs]
    for run, timeline in zip(runs, timelines, strict=True):
        if not timeline.samples:
            raise RunError(
                f"RUN={run.name!r} holds no step times, as an event log does not: name the folder of a "
                "finished run, with its report.json."
            )
    figure = Figure(figsize=(11, 0.9 + 3.5 * len(runs)), layout="constrained")
    ceiling = max(timeline.ceiling_ms for timeline in timelines)
    axes = figure.subplots(len(runs), 1, squeeze=False, sharey=True)[:, 0]
    for number, (ax, run, timeline) in enumerate(zip(axes, runs, timelines, strict=True)):
        arm = f"{_ARMS[number]}: " if len(runs) == len(_ARMS) else ""
        _draw(ax, timeline, ceiling)
        ax.set_title(f"{arm}{_plain(run.name)}", loc="left", fontweight="bold", pad=_title_pad(timeline))
        ax.set_title(_usual_step(run), loc="right", fontsize="medium", pad=_title_pad(timeline))
    axes[-1].set_xlabel("step")
    figure.suptitle(_plain(_comparison(runs)))
    handles = _legend(timelines)
    lines = math.ceil(len(handles) / _MOST_LABELS)
    columns = math.ceil(len(handles) / lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw(ax: Axes, timeline: Timeline, ceiling: float) -> None:
    for band in timeline.bands:
        ax.axvspan(band.first - 0.5, band.last + 0.5, color=colour_of(band.phase), alpha=0.12, linewidth=0)
    for phase in timeline.phases:
        for compiled in (False, True):
            chosen = [s for s in timeline.samples if (s.phase, s.compiled) == (phase, compiled)]
            _scatter(ax, [s for s in chosen if s.note not in _SPECIAL], ceiling, filled=compiled)
    _crosses(ax, [s for s in timeline.samples if s.note == "profiled"], ceiling)
    for stall in timeline.stalls:
        _stall(ax, stall, ceiling, labelled=stall is max(timeline.stalls, key=lambda s: s.ms))
    for row, mark in enumerate(timeline.marks):
        _mark(ax, mark.step + 0.5, mark.label if row < 3 else "", row, dashed=mark.kind == "flip")
    ax.set_xlim(timeline.first - 0.5, timeline.last + 0.5)
    ax.set_ylim(0, ceiling)
    ax.set_ylabel("ms a step")
    ax.grid(axis="y", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def _scatter(ax: Axes, samples: Sequence[StepSample], ceiling: float, *, filled: bool) -> None:
    if not samples:
        return
    colour = colour_of(samples[0].phase)
    ax.scatter(
        [s.step for s in samples],
        [min(s.ms, ceiling) for s in samples],
        s=11,
        facecolors=colour if filled else "white",
        edgecolors=colour,
        linewidths=0.9,
        clip_on=False,
        zorder=3,
    )


def _crosses(ax: Axes, samples: Sequence[StepSample], ceiling: float) -> None:
    if samples:
        heights = [min(s.ms, ceiling) for s in samples]
        colours = [colour_of(s.phase) for s in samples]
        ax.scatter([s.step for s in samples], heights, marker="x", s=14, c=colours, linewidths=0.9, zorder=3)


def _stall(ax: Axes, stall: StepSample, ceiling: float, *, labelled: bool) -> None:
    height = min(stall.ms, ceiling)
    ax.scatter(
        [stall.step], [height], marker="^", s=60, color=colour_of(stall.phase), edgecolors="black",
        linewidths=0.7, clip_on=False, zorder=4,
    )  # fmt: skip
    if labelled and stall.ms > ceiling:
        text = f"step {stall.step} stalled: {wording.seconds(stall.ms / 1e3)}"
        ax.annotate(
            text, (stall.step, height), (8, -3), textcoords="offset points", va="top", path_effects=_HALO
        )


def _mark(ax: Axes, step: float, label: str, row: int, *, dashed: bool) -> None:
    ax.axvline(step, color="black", linewidth=1.0, linestyle="--" if dashed else "-", zorder=2)
    # Above the axes and below each other: the flip and the verdict are near each other in a long run.
    ax.annotate(
        _plain(label), (step, 1), (4, 5 + 12 * row), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize="small", annotation_clip=False,
    )  # fmt: skip


def _title_pad(timeline: Timeline) -> float:
    return 8.0 + 12 * min(3, len(timeline.marks))


def _usual_step(run: Run) -> str:
    steps = usual_steps(run)
    arms = [arm_of(s) for s in steps if arm_of(s)]
    how = f", {steps[0].phase}, {max(arms, key=arms.count)}" if arms else ""
    return _plain(f"usual step: {wording.step_time(typical(run))}{how}")


def _comparison(runs: Sequence[Run]) -> str:
    if len(runs) != len(_ARMS):
        report = runs[0].report
        return wording.speed(report.speedup) if report and report.speedup else "step times"
    before, after = map(typical, runs)
    if before is None or after is None or not after.median > 0:
        return "before and after"
    return f"before / after: {before.median / after.median:.2f}x (two runs, so without an interval)"


def _legend(timelines: Sequence[Timeline]) -> list[Line2D]:
    phases = dict.fromkeys(phase for timeline in timelines for phase in timeline.phases)
    dots = [_dot(phase, colour_of(phase)) for phase in phases]
    how = [_dot("compiled", _GREY), _dot(ring_label(timelines), _GREY, filled=False)]
    stalls = [_dot("stalled for the compiler", _GREY, marker="^")] if any(t.stalls for t in timelines) else []
    profiled = any(s.note == "profiled" for timeline in timelines for s in timeline.samples)
    crosses = [_dot("under the profiler", _GREY, marker="x")] if profiled else []
    return [*dots, *how, *stalls, *crosses]


def _dot(label: str, colour: str, *, filled: bool = True, marker: str = "o") -> Line2D:
    return Line2D(
        [], [], linestyle="", marker=marker, label=_plain(label), color=colour,
        markerfacecolor=colour if filled else "white",
    )  # fmt: skip


def _plain(text: str) -> str:
    """Names are no formulas: matplotlib sets what is between two dollar signs as one."""
    return text.replace("$", r"\$")
