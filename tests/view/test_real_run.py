"""A real short training: its files are read back, drawn and traced as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_hotcompile.view.chrome_trace import trace_of
from lightning_hotcompile.view.page import run_to_html
from lightning_hotcompile.view.run import Run, load_run
from lightning_hotcompile.view.timeline import timeline_of
from tests.hot import hot
from tests.models import Net, fit, loader, seeded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of 48 steps has left."""
    made = tmp_path_factory.mktemp("run")
    callback = hot(event_log=str(made / "events.jsonl"))
    fit(seeded(Net), [callback], train=loader(96), max_epochs=4)
    assert callback.report.phase == "steady"
    (made / "report.json").write_text(callback.report.to_json(), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return load_run(folder)


def test_nothing_of_it_is_unreadable(run: Run, folder: Path) -> None:
    assert run.problems == ()
    assert run.report is not None
    assert json.loads(run.report.to_json()) == json.loads(
        (folder / "report.json").read_text(encoding="utf-8")
    )


def test_each_step_is_there_once(run: Run) -> None:
    assert run.report is not None
    assert [s.step for s in run.samples] == list(range(1, run.report.steps + 1)) == list(range(1, 49))
    per_phase = {p.name: p.steps for p in run.report.phases}
    assert {name: sum(s.phase == name for s in run.samples) for name in per_phase} == per_phase
    ends = [s.start_s + s.ms / 1e3 for s in run.samples]
    assert all(s.start_s >= end - 1e-5 for end, s in zip(ends, run.samples[1:], strict=False))


def test_the_compile_is_a_stall_of_the_flip(run: Run) -> None:
    stalls = timeline_of(run).stalls
    assert stalls
    assert stalls[0].phase == "flipping"
    assert stalls[0].compiled
    steady = [s for s in run.samples if s.phase == "steady" and not s.note]
    assert steady
    assert all(s.compiled for s in steady)


def test_the_log_is_the_events_of_the_report(run: Run) -> None:
    assert run.log == run.events
    alone = load_run(Path(run.name) / "events.jsonl")
    assert alone.report is not None
    assert run.report is not None
    assert (alone.report.phase, alone.report.plan) == (run.report.phase, run.report.plan)
    assert alone.report.recompiles == run.report.recompiles


def test_it_is_drawn_and_traced(run: Run) -> None:
    source = run_to_html(run)
    stalls = len(timeline_of(run).stalls)
    assert len(re.findall(r'<circle class="step ', source)) == len(run.samples) - stalls
    assert len(re.findall(r'<path class="stall"', source)) == stalls
    trace = trace_of(run)["traceEvents"]
    slices = [r for r in trace if r["ph"] == "X" and r["cat"] == "steps"]
    end = max(r["ts"] + r["dur"] for r in slices)
    told = [r["ts"] for r in trace if r["ph"] == "i"]
    assert told
    assert all(0 <= ts <= end + 1e6 for ts in told)
