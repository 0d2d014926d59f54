"""The suite ``scopes`` with a runner that knows what each scope gains, and once for real."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from lightning_hotcompile.bench import one_scope, provenance
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.bench.scopes_suite import ScopesSuite
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.plan.prior import AROUND_S, Gain
from lightning_hotcompile.run import judge

SCOPES: dict[str, Mapping[str, Any]] = {"step": {"scope": "step"}, "module": {"scope": "module"}}
CASES_USED = ["mlp", "cnn", "lstm", "gan", "unet", "wide"]


class FakeRunner:
    def __init__(self, failing: str = "", why: str = "boom") -> None:
        self.failing, self.why = failing, why
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        assert not list(folder.iterdir())
        self.calls.append((case, dict(options)))
        if case == self.failing:
            raise RunFailed(self.why)
        speedup = 1.0 + 0.1 * len(self.calls)
        return {
            "phase": "steady", "reason": "faster", "scope": options["scope"], "regions": ["step"],
            "eager_ms": 10.0 + len(self.calls), "speedup": speedup, "low": speedup - 0.1,
            "high": speedup + 0.1, "pairs": 40, "compile_s": 20.0, "parameters": 7,
            "ops": {"aten.mm.default": 3, "aten.add.Tensor": 2}, "elements": {"aten.add.Tensor": 9},
            "seconds": {"aten.add.Tensor": 2e-3, "aten.mm.default": 5e-3},
        }  # fmt: skip


def run(
    folder: Path, runner: FakeRunner, command: str = "test", **changes: Any
) -> tuple[list[dict[str, Any]], str]:
    given: dict[str, Any] = {"cases": CASES_USED, "quick_cases": ["mlp"], "scopes": SCOPES}
    told = io.StringIO()
    suite = ScopesSuite(**{**given, "options": {"threshold": 3}, **changes})
    rows = suite.run(folder, runner=runner, console=Console(file=told, width=200), command=command)
    return rows, told.getvalue()


def test_each_scope_of_each_case_is_measured_with_its_options(tmp_path: Path) -> None:
    runner = FakeRunner()
    rows, told = run(tmp_path, runner)
    assert [(row["case"], row["plan"]) for row in rows] == [(c, s) for c in CASES_USED for s in SCOPES]
    assert runner.calls[1] == ("mlp", {"threshold": 3, "scope": "module"})
    assert "mlp, step: 1.10x [1.00, 1.20], compiled in 20.0 s" in told


def test_files_say_the_same(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, FakeRunner())
    assert json.loads((tmp_path / "scopes.json").read_text())["rows"] == rows
    table = pd.read_csv(tmp_path / "scopes.csv")
    assert list(table["ops"]) == [5] * 12
    assert list(table["fusible"]) == [2] * 12
    assert list(table["light_s"]) == pytest.approx([0.002 + 2 * AROUND_S] * 12)
    assert list(table["regions"]) == ["1 step"] * 12
    page = (tmp_path / "scopes.md").read_text()
    assert "step 1.56x (6), module 1.66x (6), the best of each, eager included, 1.66x" in page
    header, first = (line.split("|") for line in page.splitlines() if line.startswith(("| case", "| mlp")))
    assert [word.strip() for word in header if word.strip() == "light"] == ["light"]
    light = float(first[[word.strip() for word in header].index("light")])
    assert light == pytest.approx(2 / statistics.mean([row["eager_ms"] for row in rows[:2]]), abs=0.01)
    gains = json.loads((tmp_path / "prior.json").read_text())["gains"]
    assert Gain(**gains["step"]).cases == 6


def test_what_cannot_be_compiled_is_a_row_with_its_reason(tmp_path: Path) -> None:
    rows, told = run(tmp_path, FakeRunner(failing="gan"))
    assert [row["reason"] for row in rows if row["case"] == "gan"] == ["boom", "boom"]
    assert "gan, step: failed: boom" in told
    table, failed, *_ = (tmp_path / "scopes.md").read_text().split("| case")[1].split("\n## ")
    assert "gan" not in table
    assert failed.strip().splitlines()[2:] == ["- gan, step: boom", "- gan, module: boom"]


def test_what_an_error_says_is_no_markup(tmp_path: Path) -> None:
    _, told = run(tmp_path, FakeRunner(failing="mlp", why="no [mask], no [/cpu]"), cases=["mlp"])
    assert "mlp, step: failed: no [mask], no [/cpu]" in told


def test_a_page_whose_first_row_failed_says_so(tmp_path: Path) -> None:
    run(tmp_path, FakeRunner(failing="mlp"), cases=["mlp"])
    page = (tmp_path / "scopes.md").read_text()
    assert "Nothing is measured yet.\n\n## Failed, to be tried again\n\n- mlp, step: boom" in page


def test_the_prior_is_fitted_to_other_machines_too(tmp_path: Path) -> None:
    run(tmp_path / "one", FakeRunner())
    run(tmp_path / "two", FakeRunner(), also=[str(tmp_path / "one" / "scopes.json")])
    prior = json.loads((tmp_path / "two" / "prior.json").read_text())
    assert Gain(**prior["gains"]["step"]).cases == 12
    assert [each["command"] for each in prior["measured"]] == ["test", "test"]
    assert len(pd.read_csv(tmp_path / "two" / "scopes.csv")) == 12


def test_an_interrupted_suite_goes_on_where_it_was(tmp_path: Path) -> None:
    run(tmp_path, FakeRunner(), cases=["mlp"])
    second = FakeRunner()
    rows, _ = run(tmp_path, second, cases=["mlp", "cnn"])
    assert [case for case, _ in second.calls] == ["cnn", "cnn"]
    assert len(rows) == 4


def test_rows_of_another_commit_say_so_and_stand_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "aaaaaaa")
    run(tmp_path, FakeRunner(), cases=["cnn"], command="the first one")
    file = tmp_path / "scopes.json"
    before = json.loads(file.read_text())
    for row in before["rows"]:
        del row["commit"], row["command"]  # as files were written before
    file.write_text(json.dumps(before))
    monkeypatch.setattr(provenance, "commit", lambda: "bbbbbbb")
    run(tmp_path, FakeRunner(), cases=["mlp", "cnn"], command="another one")
    after = json.loads(file.read_text())
    found = [(row["case"], row["plan"], row["commit"]) for row in after["rows"]]
    assert found == [
        ("mlp", "step", "bbbbbbb"),
        ("mlp", "module", "bbbbbbb"),
        ("cnn", "step", "aaaaaaa"),
        ("cnn", "module", "aaaaaaa"),
    ]
    assert after["commit"] == "bbbbbbb, aaaaaaa"
    assert "- commit: bbbbbbb, aaaaaaa" in (tmp_path / "scopes.md").read_text()
    assert "- command: another one; the first one" in (tmp_path / "scopes.md").read_text()


def test_without_git_no_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: None)
    run(tmp_path, FakeRunner(), cases=["cnn"])
    assert json.loads((tmp_path / "scopes.json").read_text())["commit"] is None
    assert "- commit" not in (tmp_path / "scopes.md").read_text()


def test_choosing() -> None:
    suite = ScopesSuite(cases=["cnn"], quick_cases=["mlp"], scopes=SCOPES)
    assert suite.chosen(None, False).cases == ["cnn"]
    assert suite.chosen(None, True).cases == ["mlp"]
    assert suite.chosen("gan", True).cases == ["gan"]
    assert suite.chosen("all", False).cases == list(CASES)
    with pytest.raises(ConfigError, match="cases: '24' is unknown"):
        suite.chosen(24, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cases": ["mpl"]}, "'mpl'.*mlp"),
        ({"pairs": 3}, "pairs=3"),
        ({"also": ["nowhere.json"]}, "also.*'nowhere.json'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ScopesSuite(**{"cases": ["mlp"], "quick_cases": ["mlp"], "scopes": SCOPES, **changes})


def test_one_scope_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "SETTLING_LOOKS", (10,))
    options = {"scope": "step", "backend": "aot_eager", "cost_gate": False, "min_speedup": 0.0, "store": None}
    row = one_scope.run(CASES["mlp"], 10, {**options, "prewarm": False})
    assert (row["phase"], row["pairs"], row["regions"]) == ("steady", 10, ["step", "optimizer"])
    assert row["low"] <= row["speedup"] <= row["high"]
    assert row["ops"]["aten.addmm.default"] == 2
    assert "aten.add_.Tensor" not in row["ops"], "of the optimizer"
    assert row["elements"]["aten.relu.default"] == 2 * 64 * 256
    json.dumps(row)
