"""A suite with a made-up measurement: what it asks for, keeps, skips and goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.bench.all_suites import AllSuites
from lightning_hotcompile.bench.record_file import CannotWrite, OtherResults
from lightning_hotcompile.bench.runs import RunFailed, RunKilled, RunTimedOut
from lightning_hotcompile.errors import ConfigError
from tests.bench.suite_examples import FakeMeasure, a_suite, measured, quiet, said


def clock(step: float) -> Callable[[], float]:
    """Each look at it comes so many seconds later."""
    seconds = iter(range(10_000))
    return lambda: step * next(seconds)


def statuses(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "made-up.json").read_text("utf-8"))
    return {r["row"]: r["status"] for r in content["records"] if r["arm"] != "eager"}


def test_each_row_is_asked_for_once_with_its_sizes(tmp_path: Path) -> None:
    fake = FakeMeasure()
    records = a_suite(warmup=3, rounds=7).run(tmp_path, measure=fake, console=quiet(), command="test")
    assert [(r.workload, r.sizes.get("width")) for r in fake.requests] == [
        ("simple", 16),
        ("simple", 32),
        ("attention", None),
    ]
    assert {(r.warmup, r.rounds, r.device, r.backend) for r in fake.requests} == {(3, 7, "cpu", "inductor")}
    assert len(records) == 6
    assert {p.name for p in tmp_path.iterdir()} == {
        f"made-up.{end}" for end in ("json", "csv", "md", "tex", "png")
    }


def test_quick_and_case_choose_rows(tmp_path: Path) -> None:
    assert [r.key for r in a_suite().chosen(None, True).chosen_rows()] == ["mixed"]
    assert [r.key for r in a_suite().chosen("attention", False).chosen_rows()] == ["attention"]
    assert len(a_suite().chosen("all", False).chosen_rows()) == 3
    with pytest.raises(ConfigError, match=r"case='atention' is unknown.*did you mean 'attention'"):
        a_suite().chosen("atention", False)
    with pytest.raises(ConfigError, match=r"case='attention' is not in size=quick: use size=default"):
        a_suite().chosen("attention", True)
    with pytest.raises(ConfigError, match=r"case='5' is unknown: use simple, attention"):
        a_suite().chosen(5, False)


def test_what_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    interrupted, console = FakeMeasure(), quiet()
    interrupted.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        a_suite().run(tmp_path, measure=interrupted, console=console)
    assert f"stopped; the same output_dir goes on: {tmp_path}" in said(console)
    again, console = FakeMeasure(), quiet()
    records = a_suite().run(tmp_path, measure=again, console=console)
    assert [r.workload for r in again.requests] == ["attention"]
    assert "suite made-up: 1 row, about" in said(console)
    assert len(records) == 6


def test_a_row_of_the_same_name_with_other_sizes_is_measured(tmp_path: Path) -> None:
    a_suite(rows={"default": [{"case": "mlp", "batch_size": 4}]}).run(
        tmp_path, measure=FakeMeasure(), console=quiet()
    )
    fake = FakeMeasure()
    a_suite(rows={"default": [{"case": "mlp", "batch_size": 8}]}).run(tmp_path, measure=fake, console=quiet())
    assert [r.sizes for r in fake.requests] == [{"batch_size": 8}]


def test_another_setting_is_refused(tmp_path: Path) -> None:
    a_suite().run(tmp_path, measure=FakeMeasure(), console=quiet())
    with pytest.raises(OtherResults, match=r"rounds is 100 there and 50 now.*Take another output_dir"):
        a_suite(rounds=50).run(tmp_path, measure=FakeMeasure(), console=quiet())


def test_a_broken_file_of_any_suite_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    both = AllSuites(suites={name: a_suite(name=name) for name in ("one", "two")})
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "two.json").write_text("{", encoding="utf-8")
    fake = FakeMeasure()
    with pytest.raises(OtherResults, match=r"two.json cannot be read .*take another output_dir"):
        both.run(tmp_path, measure=fake, console=quiet())
    assert fake.requests == []


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["rows"][0].pop("measured"),
        lambda content: content["rows"][0]["measured"]["arms"]["eager"].update(of_a_later_version=1),
        lambda content: content.update(rows=[3]),
        lambda content: content.update(failures=["x"]),
    ],
)
def test_rows_of_another_form_are_refused(change: Callable[[Any], object], tmp_path: Path) -> None:
    a_suite().run(tmp_path, measure=FakeMeasure(), console=quiet())
    file = tmp_path / "made-up.json"
    content = json.loads(file.read_text("utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(OtherResults, match=r"made-up.json has rows that this version cannot read"):
        a_suite().run(tmp_path, measure=FakeMeasure(), console=quiet())


@pytest.mark.parametrize("where", ["file", "file/below", "taken"])
def test_a_folder_that_takes_no_files_is_one_error_that_names_it(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "taken" / "made-up.tmp").mkdir(parents=True)
    fake = FakeMeasure()
    with pytest.raises(CannotWrite, match=rf"{where} cannot be written to: .*Take another output_dir"):
        a_suite().run(tmp_path / where, measure=fake, console=quiet())
    assert len(fake.requests) <= 1


def test_results_stay_if_the_tables_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "made-up.csv").mkdir()
    with pytest.raises(CannotWrite, match=r"made-up.csv"):
        a_suite().run(tmp_path, measure=FakeMeasure(), console=quiet())
    assert set(statuses(tmp_path).values()) == {"ok"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunTimedOut("it took more than 9 s"), "TIMEOUT"),
        (RunKilled("it was ended by signal 9"), "OOM"),
        (RunFailed("ValueError: no"), "ERROR"),
    ],
)
def test_a_failure_in_one_row_ends_nothing_and_is_tried_again(
    error: RunFailed, status: str, tmp_path: Path
) -> None:
    fake, console = FakeMeasure({"simple": error}), quiet()
    a_suite().run(tmp_path, measure=fake, console=console)
    assert statuses(tmp_path) == {
        "simple width=16": status,
        "simple width=32": status,
        "attention": "ok",
    }
    assert str(error) in said(console)
    again = FakeMeasure()
    a_suite().run(tmp_path, measure=again, console=quiet())
    assert [r.workload for r in again.requests] == ["simple", "simple"]
    assert set(statuses(tmp_path).values()) == {"ok"}


@pytest.mark.parametrize(("status", "tries"), [("INVALID", 0), ("OOM", 0), ("ERROR", 1)])
def test_a_finding_is_kept_and_an_error_is_tried_again(status: str, tries: int, tmp_path: Path) -> None:
    answer = {"attention": measured(status=status, reason="why")}
    a_suite().run(tmp_path, measure=FakeMeasure(answer), console=quiet())
    assert statuses(tmp_path)["attention"] == status
    again = FakeMeasure()
    a_suite().run(tmp_path, measure=again, console=quiet())
    assert len(again.requests) == tries


def test_the_time_budget_is_kept(tmp_path: Path) -> None:
    # Each look at the clock takes 50 s, so a row takes 50 s: the third one would be over.
    fake, console = FakeMeasure(), quiet()
    suite = a_suite(budget_s={"default": 200.0})
    suite.run(tmp_path, measure=fake, console=console, now=clock(30.0))
    assert 1 <= len(fake.requests) < 3
    assert statuses(tmp_path)["attention"] == "SKIPPED"
    assert "the time budget of 200 s has" in said(console)
    assert all(limit <= 200.0 for limit in fake.limits)
    again = FakeMeasure()
    a_suite().run(tmp_path, measure=again, console=quiet())
    assert "attention" in [r.workload for r in again.requests]


def test_the_estimate_and_the_answers_are_printed(tmp_path: Path) -> None:
    console = quiet()
    a_suite().run(tmp_path, measure=FakeMeasure(), console=console)
    assert "suite made-up: 3 rows, about 1.5 min, at most 10.0 min" in said(console)
    assert "Where compiling helps and where it hurts" in said(console)
    assert "A step that takes 1 to 10 ms eagerly: 3 of 3 paid, after 4,000 steps" in said(console)


def test_results_carry_machine_versions_and_command(tmp_path: Path) -> None:
    a_suite().run(tmp_path, measure=FakeMeasure(), console=quiet(), command="benchmark suite=made-up")
    content = json.loads((tmp_path / "made-up.json").read_text("utf-8"))
    assert content["command"] == "benchmark suite=made-up"
    assert content["setting"]["machine"]
    assert "torch" in content["setting"]["versions"]
    assert content["rule_of_thumb"][0]["median_steps"] == 4000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "ful"}, "size='ful' is unknown"),
        ({"device": "tpu"}, "device='tpu' is unknown"),
        ({"rounds": 0}, "rounds=0 is not allowed"),
        ({"formats": ["cvs"]}, "did you mean 'csv'"),
        ({"formats": "cvs"}, "did you mean 'csv'"),
        ({"rows": {"default": [{"case": "mlpp", "batch_size": 4}]}}, "did you mean 'mlp'"),
    ],
)
def test_a_wrong_value_is_refused_at_construction(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        a_suite(**changes)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda' needs a CUDA device"):
        a_suite(device="cuda")


def test_all_suites_share_one_budget(tmp_path: Path) -> None:
    both = AllSuites(
        suites={name: a_suite(name=name) for name in ("one", "two")},
        budget_s={"default": 100.0, "quick": None},
    )
    fake = FakeMeasure()
    records = both.run(tmp_path, measure=fake, console=quiet(), now=clock(95.0))
    assert {r["suite"]: r["status"] for r in records} == {"one": "SKIPPED", "two": "SKIPPED"}
    assert fake.requests == []


def test_all_suites_share_one_page(tmp_path: Path) -> None:
    both = AllSuites(suites={"one": a_suite(name="one"), "two": a_suite(name="two")})
    records = both.run(tmp_path, measure=FakeMeasure(), console=quiet(), command="test")
    assert {r["suite"] for r in records} == {"one", "two"}
    assert (tmp_path / "one" / "one.csv").exists()
    assert (tmp_path / "two" / "two.md").exists()
    text = (tmp_path / "all.md").read_text("utf-8")
    assert "6 of 6 paid" in text
    assert "one: attention" in text
    assert "two: attention" in text
    assert list(both.chosen("two", True).suites) == ["two"]
    assert both.chosen("all", True).suites["one"].size == "quick"
    with pytest.raises(ConfigError, match="case='thre' is no suite"):
        both.chosen("thre", False)
