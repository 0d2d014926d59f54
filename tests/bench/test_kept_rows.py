"""What the suites of cases find in their folder: gone on with, measured again, or refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_hotcompile.bench import provenance
from lightning_hotcompile.bench.case_suite import CaseSuite
from lightning_hotcompile.bench.heap_suite import HeapSuite
from lightning_hotcompile.bench.kept_rows import failures, is_impossible
from lightning_hotcompile.bench.record_file import CannotWrite, OtherResults
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.bench.scopes_suite import ScopesSuite
from lightning_hotcompile.bench.steady_suite import SteadySuite

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
SETTING = {"machine": "here", "versions": {"torch": "2.13.0"}, "commit": "aaaaaaa"}
SCOPES: dict[str, Mapping[str, Any]] = {"step": {"scope": "step"}, "module": {"scope": "module"}}


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "setting", lambda threads=0: SETTING)


class FakeRunner:
    """Each row is of the same form, as none of the suites reads more of it than this."""

    def __init__(self, fails: Mapping[str, str]) -> None:
        self._fails = fails
        self.calls: list[tuple[str, str]] = []

    def __call__(self, case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        self.calls.append((case, plan))
        if plan in self._fails:
            raise RunFailed(self._fails[plan])
        return {
            "phase": "steady", "reason": "faster", "ours_ms": 1.0, "theirs_ms": 2.0,
            "ratio": 2.0, "speedup": 2.0, "low": 1.9, "high": 2.1, "eager_ms": 2.0, "compile_s": 1.0,
            "ops": {"aten.add.Tensor": 2}, "elements": {"aten.add.Tensor": 9},
            "seconds": {"aten.add.Tensor": 2e-3},
            "before_ms": 2.0, "after_ms": 1.0, "before_faults": 9, "after_faults": 0,
        }  # fmt: skip


def steady(**changes: Any) -> SteadySuite:
    given: dict[str, Any] = {"cases": ["mlp"], "quick_cases": [], "arms": ["eager", "step"]}
    return SteadySuite(**{**given, "options": {"threshold": 3}, **changes})


def scopes(**changes: Any) -> ScopesSuite:
    return ScopesSuite(**{"cases": ["mlp"], "quick_cases": [], "scopes": SCOPES, **changes})


def heap(**changes: Any) -> HeapSuite:
    return HeapSuite(**{"cases": ["mlp"], "quick_cases": [], "turns": 1, **changes})


def run(
    suite: CaseSuite, folder: Path, threads: int = 0, fails: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """The rows that were tried; those of some ways fail."""
    runner = FakeRunner(fails or {})
    suite.run(folder, threads=threads, runner=runner, console=Console(file=io.StringIO()), command="test")
    return runner.calls


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (steady(), steady(options={"threshold": 4}), "options is {'threshold': 3} there and"),
        (steady(), steady(blocks=12), "blocks is 60 there and 12 now"),
        (steady(), steady(pairs=5), "pairs is 3 there and 5 now"),
        (steady(), steady(steps=20), "steps is 200 there and 20 now"),
        (scopes(), scopes(pairs=10), "pairs is 40 there and 10 now"),
        (
            scopes(),
            scopes(scopes={"module": {"scope": "regions"}}),
            "options of module is {'scope': 'module'} there and {'scope': 'regions'} now",
        ),
        (heap(), heap(steps=20), "steps is 150 there and 20 now"),
    ],
)
def test_rows_that_were_measured_otherwise_are_refused(
    before: CaseSuite, now: CaseSuite, words: str, tmp_path: Path
) -> None:
    run(before, tmp_path)
    for suite in (now, now.chosen("cnn", False)):  # not beside the other rows either
        with pytest.raises(OtherResults) as caught:
            run(suite, tmp_path)
        assert words in str(caught.value)
        assert "Take another output_dir, or the same setting." in str(caught.value)
    assert run(before, tmp_path) == []


@pytest.mark.parametrize("suite", [steady(), scopes(), heap()])
def test_so_are_those_of_another_machine_or_number_of_threads(
    suite: CaseSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(suite, tmp_path)
    with pytest.raises(OtherResults, match="threads is 0 there and 2 now"):
        run(suite, tmp_path, threads=2)
    monkeypatch.setitem(SETTING, "machine", "elsewhere")
    with pytest.raises(OtherResults, match="machine is 'here' there and 'elsewhere' now"):
        run(suite, tmp_path)
    monkeypatch.setitem(SETTING, "machine", "here")
    monkeypatch.setitem(SETTING, "versions", {"torch": "2.14.0"})
    with pytest.raises(OtherResults, match=r"versions is .*2\.13\.0.* there and .*2\.14\.0.* now"):
        run(suite, tmp_path)


@pytest.mark.parametrize(
    ("before", "now", "measured"),
    [
        (steady(), steady(cases=["mlp", "cnn"], arms=["eager"]), [("cnn", "eager")]),
        (
            scopes(),
            scopes(scopes={"module": SCOPES["module"], "regions": {"scope": "regions"}}),
            [("mlp", "regions")],
        ),
        (heap(), heap(turns=2), [("mlp", "kept 2"), ("mlp", "left 2")]),
    ],
)
def test_other_cases_and_other_ways_are_added(
    before: CaseSuite, now: CaseSuite, measured: list[tuple[str, str]], tmp_path: Path
) -> None:
    run(before, tmp_path)
    assert run(now, tmp_path) == measured
    assert run(before, tmp_path) == []


def test_a_scope_of_an_earlier_command_is_still_known_by_its_options(tmp_path: Path) -> None:
    run(scopes(), tmp_path)
    run(scopes(scopes={"regions": {"scope": "regions"}}), tmp_path)
    with pytest.raises(OtherResults, match="options of step is"):
        run(scopes(scopes={"step": {"scope": "step", "compile_optimizer": False}}), tmp_path)


def test_another_commit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(heap(), tmp_path)
    monkeypatch.setitem(SETTING, "commit", "bbbbbbb")
    assert run(heap(), tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("setting"), "does not say how its results were measured"),
        (lambda content: content["rows"][0].pop("plan"), "has rows that this version cannot read"),
        (lambda content: content.update(rows=[3]), "has rows that this version cannot read"),
    ],
)
def test_a_file_of_which_nothing_is_known_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    run(heap(), tmp_path)
    file = tmp_path / "heap.json"
    content = json.loads(file.read_text("utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(OtherResults, match=f"heap.json {words}.*take another output_dir"):
        run(heap(), tmp_path)


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "heap.csv").mkdir()
    with pytest.raises(CannotWrite, match=r"heap\.csv.*Take another output_dir"):
        run(heap(), tmp_path)


REFUSALS = (
    "NotImplementedError: manual optimization: training_step holds the optimizers' steps",
    "lightning_hotcompile.errors.PlanError: scope='step' is not possible: manual optimization",
)


@pytest.mark.parametrize("suite", [steady(), scopes(), heap()])
@pytest.mark.parametrize("why", ["it was ended by signal 9", "it took more than 1800 s", "ValueError: 3"])
def test_a_row_that_failed_is_measured_by_the_next_command(
    suite: CaseSuite, why: str, tmp_path: Path
) -> None:
    first, second = list(suite.ways)
    assert run(suite, tmp_path, fails={first: why}) == [("mlp", first), ("mlp", second)]
    assert run(suite, tmp_path, fails={first: "once more"}) == [("mlp", first)]
    assert run(suite, tmp_path) == [("mlp", first)]
    assert run(suite, tmp_path) == []
    rows = json.loads((tmp_path / f"{suite.name}.json").read_text("utf-8"))["rows"]
    assert [(row["plan"], row["phase"]) for row in rows] == [(first, "steady"), (second, "steady")]


@pytest.mark.parametrize("why", REFUSALS)
def test_a_row_that_can_never_be_measured_is_done(why: str, tmp_path: Path) -> None:
    run(steady(), tmp_path, fails={"step": why})
    assert run(steady(), tmp_path) == []


def test_the_committed_rows_that_failed_are_those_that_never_can_be_measured() -> None:
    for name in ("steady", "scopes"):
        content = json.loads((RESULTS / name / f"{name}.json").read_text("utf-8"))
        failed = [row for row in content["rows"] if row["phase"] == "failed"]
        assert {row["case"] for row in failed} == {"gan"}
        assert all(map(is_impossible, failed))
        assert failures(content["rows"]) == []
