"""A run as one HTML page: no script, no network, everything that it shows in the file itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.event_kinds import Event, PhaseChanged
from lightning_hotcompile.receipt.rendering import facts, plan_title, sections
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.view.captured import Captured
from lightning_hotcompile.view.chart import WIDTH, chart_of, interval_of
from lightning_hotcompile.view.run import Run
from lightning_hotcompile.view.timeline import Timeline, colour_of, ring_label, timeline_of, typical

_TEMPLATE = "page.html.j2"


def run_to_html(run: Run) -> str:
    """The page. Names from the run are text everywhere in it, whatever they hold."""
    report, timeline = run.report, timeline_of(run)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    ratio = report.speedup if report else None
    return environment.from_string(source).render(
        run=run,
        width=WIDTH,
        headline=wording.headline(report) if report else _captured_headline(run),
        tiles=_tiles(report) if report else [],
        interval=interval_of(ratio),
        speed=wording.speed(ratio),
        chart=chart_of(timeline) if timeline.samples or timeline.bands else None,
        phases=[(phase, colour_of(phase)) for phase in timeline.phases],
        eager=ring_label([timeline]),
        caption=_caption(run, timeline),
        facts=facts(report) if report else [],
        captured=list(captured_facts(run.captured)) if run.captured else [],
        plan=report.plan.rstrip() if report else "",
        plan_title=plan_title(report) if report else "",
        sections=sections(report) if report else [],
        events=list(_event_rows(run.events)),
        notes=[*(report.notes if report else ()), *(f"Could not be read: {p}." for p in run.problems)],
        versions=_versions(run),
    )


def captured_facts(captured: Captured) -> Iterator[tuple[str, str]]:
    """Name and value of what a capture has measured."""
    number, share = wording.number, captured.compiled_share
    yield "command", " ".join(captured.command)
    yield "profiled steps", str(captured.profiled_steps)
    if captured.profiled_steps:
        yield "step under the profiler", wording.milliseconds(captured.step_ms)
        yield "inside compiled regions", number(share, ".1%", " of the step time (on the host)")
        yield "operators a step", number(captured.operators_per_step, ",.0f", "")
        yield "kernel launches a step", number(captured.launches_per_step, ",.0f", "")
    for note in captured.notes:
        yield "note", note


def _captured_headline(run: Run) -> str:
    usual = typical(run)
    return f"captured, without HotCompile: a step takes {wording.step_time(usual)}"


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    ratio = report.speedup
    tiles = [("phase", report.phase, ""), ("steps", f"{report.steps:,}", "")]
    if ratio is not None and math.isfinite(ratio.value):
        tiles.insert(0, ("speed-up", f"{ratio.value:.2f}x", ratio.verdict.replace(" ", "-")))
    for name, summary in (("eager step", report.eager_ms), ("compiled step", report.compiled_ms)):
        if summary is not None:
            tiles.append((name, wording.milliseconds(summary.median), ""))
    if report.compile_s > 0:
        tiles.append(("compiling", wording.seconds(report.compile_s), ""))
    if report.saved_s is not None and math.isfinite(report.saved_s):
        lost = report.saved_s < 0
        tiles.append(("lost" if lost else "saved", wording.seconds(abs(report.saved_s)), ""))
    return tiles


def _caption(run: Run, timeline: Timeline) -> str:
    shown, steps = len(timeline.samples), run.report.steps if run.report else 0
    if not shown:
        return "Phases only: an event log does not hold the time of each step."
    some = f"{shown:,} of {steps:,} steps are shown. " if shown < steps else ""
    beyond = sum(s.ms > timeline.ceiling_ms for s in timeline.samples)
    high = f"{wording.count(beyond, 'step')} took longer than the axis reaches. " if beyond else ""
    profiled = sum(s.note == "profiled" for s in timeline.samples)
    slow = f"{wording.count(profiled, 'step')} ran under the profiler. " if profiled else ""
    return f"{some}{high}{slow}Point at a step to see its time."


def _event_rows(events: Sequence[Event]) -> Iterator[tuple[str, str, str, str]]:
    zero = next((e.time for e in events if math.isfinite(e.time)), 0.0)
    for event in events:
        after = f"{event.time - zero:.2f} s" if math.isfinite(event.time) else ""
        kind = event.kind.replace("_", " ")
        words = f"{event.phase}: {event.reason}" if isinstance(event, PhaseChanged) else str(event)
        yield str(event.step), after, kind, words


def _versions(run: Run) -> str:
    known = run.report.versions if run.report else run.captured.versions if run.captured else {}
    return ", ".join(f"{name} {version}" for name, version in known.items())
