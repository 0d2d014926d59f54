"""The trace keeps the rules of the Trace Event Format, and tells the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_hotcompile.receipt.event_kinds import Declined, Event
from lightning_hotcompile.view.chrome_trace import trace_json, trace_of
from lightning_hotcompile.view.from_events import report_from_events
from lightning_hotcompile.view.run import Run
from tests.view.examples import HOSTILE, captured, events, hostile_report, report, samples

RUN = Run(name="outputs/a", report=report(), events=tuple(events()))
LOG = Run(name="log", report=report_from_events(events()), events=tuple(events()))
CAPTURE = Run(name="before", captured=captured())
HOSTILE_RUN = Run(name=HOSTILE, report=hostile_report(), events=tuple(events()))


def records(run: Run) -> list[dict[str, Any]]:
    found = json.loads(trace_json(run))
    assert found == json.loads(json.dumps(trace_of(run)))
    return list(found["traceEvents"])


def of(run: Run, **wanted: object) -> list[dict[str, Any]]:
    return [r for r in records(run) if all(r.get(k) == v for k, v in wanted.items())]


@pytest.mark.parametrize("run", [RUN, LOG, CAPTURE, HOSTILE_RUN], ids=["run", "log", "capture", "hostile"])
def test_it_keeps_the_rules_of_the_format(run: Run) -> None:
    for record in records(run):
        assert record["ph"] in ("X", "C", "i", "M")
        assert isinstance(record["name"], str)
        assert record["name"]
        assert type(record["pid"]) is type(record["tid"]) is int
        assert math.isfinite(record["ts"])
        assert isinstance(record["args"], dict)
        if record["ph"] == "X":
            assert record["dur"] >= 0
            assert record["cat"]
        if record["ph"] == "i":
            assert record["s"] in ("g", "p", "t")
        if record["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in record["args"].values())
        if record["ph"] == "M":
            assert record["name"] in ("process_name", "thread_name", "thread_sort_index")


@pytest.mark.parametrize("run", [RUN, LOG, CAPTURE], ids=["run", "log", "capture"])
def test_slices_of_a_track_do_not_cross(run: Run) -> None:
    for track in ("phases", "steps", "compiling"):
        spans = sorted((r["ts"], r["ts"] + r["dur"]) for r in of(run, ph="X", cat=track))
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):  # noqa: RUF007
            assert start >= end - 0.01


def test_each_track_has_a_name() -> None:
    names = {r["tid"]: r["args"]["name"] for r in of(RUN, ph="M", name="thread_name")}
    assert {r["tid"] for r in records(RUN) if r["ph"] in "Xi"} <= set(names)
    (process,) = of(RUN, ph="M", name="process_name")
    assert process["args"]["name"] == "hotcompile outputs/a"


def test_steps_phases_and_the_counter_are_those_of_the_run() -> None:
    count = Counter((r["ph"], r.get("cat")) for r in records(RUN))
    assert count["X", "steps"] == count["C", None] == len(samples())
    assert [r["name"] for r in of(RUN, cat="phases")] == ["observing", "flipping", "settling", "steady"]
    (stall,) = of(RUN, name="step 11")
    assert stall["dur"] == 3_200_000.0
    assert stall["args"]["note"] == "stalled"
    assert [r["args"]["step_ms"] for r in of(RUN, ph="C")] == [s.ms for s in samples()]


def test_the_compile_lies_in_its_step() -> None:
    (compile_,), (stall,) = of(RUN, cat="compiling"), of(RUN, name="step 11")
    assert compile_["dur"] == 2_900_000.0
    assert stall["ts"] <= compile_["ts"]
    assert compile_["ts"] + compile_["dur"] <= stall["ts"] + stall["dur"] + 1


def test_events_come_after_the_step_that_they_follow() -> None:
    ends = {s.step: 1e6 * (s.start_s + s.ms / 1e3) for s in samples()}
    told = of(RUN, ph="i")
    assert len(told) == len(events())
    for record in told:
        assert record["ts"] >= ends[record["args"]["step"]] - 1
        assert record["ts"] <= ends[record["args"]["step"]] + 1000


def test_several_compiles_of_one_moment_are_laid_end_to_end() -> None:
    first = events()[4]
    told = (*events()[:5], replace(first, region="head"), replace(first, region="tail", seconds=math.nan))
    spans = [(r["name"], r["ts"], r["dur"]) for r in of(replace(RUN, events=told), cat="compiling")]
    assert {name for name, _, _ in spans} == {"training_step", "head"}
    (_, later, _), (_, earlier, length) = spans
    assert earlier + length == pytest.approx(later, abs=0.01)


def test_an_event_log_has_phases_by_their_time() -> None:
    assert [r["name"] for r in of(LOG, cat="phases")] == ["flipping", "settling", "steady"]
    assert of(LOG, cat="steps") == []


@pytest.mark.parametrize(
    "told", [Declined(step=0, time=1.0, reason="no"), events()[0]], ids=["declined", "detected"]
)
def test_a_log_without_a_phase_has_its_events(told: Event) -> None:
    run = Run(name="log", report=report_from_events([told]), events=(told,))
    assert [r["name"] for r in of(run, ph="i")] == [told.kind]
    assert of(run, cat="phases") == []


def test_events_without_a_time_are_left_out() -> None:
    run = replace(RUN, events=(replace(events()[0], time=math.nan),))
    assert of(run, ph="i") == []
