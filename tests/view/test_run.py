"""Reading a run: what is there is shown, what is broken is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.capture.summary import to_json
from lightning_hotcompile.receipt.event_kinds import Declined, Reverted
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.run.judge import SETTLING_CONFIDENCE
from lightning_hotcompile.view import from_events
from lightning_hotcompile.view.restoring import report_from_dict
from lightning_hotcompile.view.run import Run, RunError, load_run
from lightning_hotcompile.watch.stats import Ratio
from tests.view.examples import captured, events, hostile_report, report, samples, write_log, write_report


def refusal(path: Path) -> str:
    with pytest.raises(RunError) as caught:
        load_run(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fused(timed_before: str | None) -> FusedOptimizer:
    return FusedOptimizer(
        name="optimizer 0",
        class_name="AdamW",
        kept=True,
        reason="",
        loop_ms=1.5,
        fused_ms=0.5,
        speedup=Ratio(value=3.0, low=2.5, high=3.5, n=8, confidence=0.98),
        runs=70,
        timed_before=timed_before,
    )


class TestReport:
    @pytest.mark.parametrize("timed_before", [None, "2026-11-23T10:00:00+00:00"])
    def test_fused_optimizers_are_read_back(self, timed_before: str | None) -> None:
        written = replace(report(), fused=(fused(timed_before),))
        found, problems = report_from_dict(json.loads(written.to_json()))
        assert (found.fused, problems) == (written.fused, [])

    def test_a_folder_and_its_file_are_the_same_run(self, tmp_path: Path) -> None:
        folder = write_report(tmp_path / "run")
        runs = [load_run(folder), load_run(folder / "report.json")]
        for run in runs:
            assert run.problems == ()
            assert run.report is not None
            assert math.isnan(run.report.overhead_us or 0.0) or run.report.overhead_us is None
            assert replace(run.report, overhead_us=None) == report(overhead_us=None)
            assert run.samples == samples()
            assert list(run.events) == events()

    @pytest.mark.parametrize("made", [report(overhead_us=1.5), hostile_report()], ids=["usual", "hostile"])
    def test_it_comes_back_as_it_was(self, made: Any) -> None:
        back, problems = report_from_dict(json.loads(made.to_json()))
        assert problems == []
        assert replace(back, overhead_us=1.0) == replace(made, overhead_us=1.0)

    def test_a_report_of_before_samples_has_none(self, tmp_path: Path) -> None:
        record = report().to_dict()
        del record["samples"], record["eager_parts"]
        record["of_a_later_version"] = {"a": 1}
        (tmp_path / "report.json").write_text(json.dumps(record), encoding="utf-8")
        run = load_run(tmp_path)
        assert (run.samples, run.problems) == ((), ())

    def test_rows_that_cannot_be_read_are_left_out_by_number(self, tmp_path: Path) -> None:
        record = report().to_dict()
        record["samples"][1] = [2, "x", 1.0, "a", True, ""]
        record["samples"][2] = [3, math.inf, 1.0, "a", True, ""]
        record["phases"][0] = {"name": "observing"}
        record["events"][0] = {"kind": "who knows"}
        (tmp_path / "report.json").write_text(json.dumps(record), encoding="utf-8")
        run = load_run(tmp_path)
        assert [s.step for s in run.samples][:3] == [1, 4, 5]
        assert run.report is not None
        assert [p.name for p in run.report.phases] == ["flipping", "steady"]
        assert len(run.events) == len(events()) - 1
        told = "\n".join(run.problems)
        for part in ("sample 2 of", "sample 3 of", "phase 1 of", "lacks 'steps'", "event 1 of"):
            assert part in told

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("", "Expecting value"),
            ('{"phase": "steady"', "Expecting"),
            ("[1, 2]", "Report is list"),
            ("{}", "Report lacks 'phase'"),
            (json.dumps({**report().to_dict(), "steps": "many"}), "Report.steps: str where int is due"),
            (json.dumps({**report().to_dict(), "steps": True}), "Report.steps: bool"),
            ('{"format": "hotcompile capture 9"}', "is not known"),
            ("[" * 100_000, "recursion"),
            (b'"\xff"', "utf-8"),
        ],
    )
    def test_a_file_that_is_no_report_is_refused(
        self, content: str | bytes, why: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "report.json"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        message = refusal(file)
        assert str(file) in message
        assert why in message
        assert "Name a run's folder" in message


class TestEventLog:
    def test_it_tells_of_a_run_that_is_under_way(self, tmp_path: Path) -> None:
        run = load_run(write_log(tmp_path / "events.jsonl", events()[:5]))
        assert run.report is not None
        assert (run.report.phase, run.report.steps) == ("flipping", 11)
        assert run.report.compile_s == 2.9
        assert run.report.plan == events()[1].tree  # type: ignore[attr-defined]
        assert "event log" in run.report.notes[0]
        assert (run.samples, run.problems) == ((), ())

    def test_its_verdict_is_that_of_the_report(self, tmp_path: Path) -> None:
        run = load_run(write_log(tmp_path / "events.jsonl"))
        assert run.report is not None
        assert run.report.speedup == report().speedup
        assert run.report.reason == report().reason
        assert run.report.parity.startswith("1 of 1 graphs agree")

    def test_the_interval_of_an_event_is_that_of_the_judge(self) -> None:
        assert from_events.CONFIDENCE == SETTLING_CONFIDENCE

    def test_a_broken_line_never_hides_the_good_ones(self, tmp_path: Path) -> None:
        file = write_log(tmp_path / "events.jsonl")
        lines = file.read_bytes().split(b"\n")
        lines[2:2] = [
            b"{not json",
            b"\xff\xfe\x00",
            b"[]",
            b'{"kind": "unheard_of"}',
            b'{"kind": "compiled"}',
        ]
        file.write_bytes(b"\n".join(lines)[:-30])  # and the last one is cut off
        run = load_run(file)
        assert list(run.log) == events()[:-1]
        numbers = [int(problem.partition("line ")[2].partition(":")[0]) for problem in run.problems]
        assert numbers == [3, 4, 5, 6, 7, 14]
        assert all(str(file) in problem for problem in run.problems)

    def test_the_last_of_several_runs_is_shown_and_all_are_listed(self, tmp_path: Path) -> None:
        validate = replace(events()[0], stage="validate", step=500)
        run = load_run(write_log(tmp_path / "events.jsonl", [*events(), validate, *events()[:3]]))
        assert list(run.events) == events()[:3]
        assert len(run.log) == 2 * len(events()) - 5

    def test_without_training_the_first_other_stage_is_shown(self, tmp_path: Path) -> None:
        told = Declined(step=0, time=1.0, stage="validate", reason="too short")
        run = load_run(write_log(tmp_path / "events.jsonl", [told]))
        assert run.report is not None
        assert (run.report.phase, run.report.reason) == ("declined", "too short")

    def test_a_folder_with_a_broken_report_is_read_from_its_log(self, tmp_path: Path) -> None:
        write_log(tmp_path / "events.jsonl")
        (tmp_path / "report.json").write_text("{", encoding="utf-8")
        run = load_run(tmp_path)
        assert list(run.events) == events()
        assert "report.json cannot be read" in run.problems[0]

    def test_a_log_of_another_name_is_found(self, tmp_path: Path) -> None:
        write_log(tmp_path / "hot.jsonl")
        assert list(load_run(tmp_path).events) == events()

    def test_a_report_beside_a_broken_log_is_shown(self, tmp_path: Path) -> None:
        write_report(tmp_path)
        (tmp_path / "events.jsonl").write_text("garbage\n", encoding="utf-8")
        run = load_run(tmp_path)
        assert run.samples == samples()
        assert list(run.log) == events()
        assert "line 1: is not JSON" in run.problems[0]


class TestRefusals:
    def test_what_is_not_there_with_what_comes_near(self, tmp_path: Path) -> None:
        write_report(tmp_path / "before")
        message = refusal(tmp_path / "befor")
        assert f"RUN='{tmp_path / 'befor'}' is not there; did you mean 'before'?" in message
        assert "name a folder that a training has written" in message
        assert "is not there: name" in refusal(tmp_path / "a" / "b")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        assert "is an empty folder: name one that" in refusal(tmp_path)

    def test_a_folder_without_a_run_names_those_below(self, tmp_path: Path) -> None:
        run = write_report(tmp_path / "2026-01-02" / "10-11-12")
        assert f"there are runs below: {run}. Name one of them." in refusal(tmp_path)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "notes.txt").write_text("x", encoding="utf-8")
        assert "holds no report.json and no event log" in refusal(tmp_path / "b")

    def test_several_logs(self, tmp_path: Path) -> None:
        write_log(tmp_path / "a.jsonl")
        write_log(tmp_path / "b.jsonl")
        assert "several event logs (a.jsonl, b.jsonl): name one" in refusal(tmp_path)

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("x", encoding="utf-8")
        assert "neither a folder nor a .json or .jsonl file" in refusal(tmp_path / "a.txt")

    @pytest.mark.parametrize("content", ["", "\n\n", "no json\n{}\n"])
    def test_a_log_without_a_readable_line(self, content: str, tmp_path: Path) -> None:
        file = tmp_path / "events.jsonl"
        file.write_text(content, encoding="utf-8")
        message = refusal(file)
        assert str(file) in message
        assert "Name a run's folder" in message
        assert ("is empty" if not content.strip() else "line 1: is not JSON") in message
        assert ("(1 more lines" in message) is bool(content.strip())


class TestCapture:
    def test_it_is_a_run_without_a_report(self, tmp_path: Path) -> None:
        (tmp_path / "summary.json").write_text(to_json(captured()), encoding="utf-8")
        run = load_run(tmp_path)
        assert run.report is None
        assert run.captured == captured()
        assert run.samples == captured().steps
        assert run.problems == ()

    def test_beside_a_report_its_profiled_steps_are_noted(self) -> None:
        run = Run(name="after", report=report(), captured=captured())
        notes = {s.step: s.note for s in run.samples}
        assert [notes[n] for n in (1, 2, 3, 5, 6, 11)] == [
            "profiled",
            "profiled",
            "profiled",
            "profiled",
            "",
            "stalled",
        ]


def test_an_event_log_tells_the_forecast_and_no_graph_breaks() -> None:
    made = from_events.report_from_events(events())
    assert made.decision == "worth it: 300 steps are left"
    assert made.graph_breaks is None
    again, problems = report_from_dict(json.loads(made.to_json()))
    assert (again.graph_breaks, problems) == (None, [])


def test_reverted_and_declined_runs_are_told_from_events() -> None:
    told = [*events()[:5], Reverted(step=12, time=1.0, reason="slower")]
    made = from_events.report_from_events(told)
    assert made.phase == "flipping"  # its change of phase was not written: the run is under way
    assert [event_to_dict(e) for e in told] == list(made.events)
