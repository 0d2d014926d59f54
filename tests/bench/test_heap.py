"""The suite ``heap`` with a runner that knows the times, and once for real."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_hotcompile.bench import one_heap
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.heap_suite import HeapSuite
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.swap.process import heap

GIVEN: dict[str, Any] = {"cases": ["cnn", "mlp"], "quick_cases": ["mlp"]}


class FakeRunner:
    """The cnn gains where memory is kept, the mlp fails."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        if case == "mlp":
            raise RunFailed("boom")
        self.rows += 1
        keeps = plan.startswith("kept")
        return {
            "before_ms": 6.0, "after_ms": 4.0 + 0.1 * self.rows if keeps else 6.0,
            "before_faults": 900, "after_faults": 2 if keeps else 900,
        }  # fmt: skip


def test_both_kinds_take_turns_and_the_page_holds_them_against_each_other(tmp_path: Path) -> None:
    told = io.StringIO()
    suite = HeapSuite(**GIVEN)
    rows = suite.run(tmp_path, runner=FakeRunner(), console=Console(file=told, width=200), command="test")
    plans = ["kept 1", "left 1", "kept 2", "left 2", "kept 3", "left 3"]
    assert [row["plan"] for row in rows if row["case"] == "cnn"] == plans
    assert "cnn, kept 1: 6 -> 4.1 ms, 900 -> 2 page faults" in told.getvalue()
    assert "mlp, kept 1: failed: boom" in told.getvalue()
    page = (tmp_path / "heap.md").read_text()
    assert "| cnn | 900 | 2 | 6 to 4.3 | 1.40 [1.33, 1.46] | 1.00 [1.00, 1.00] |" in page
    assert "| mlp" not in page
    assert "- mlp, kept 1: boom" in page
    assert json.loads((tmp_path / "heap.json").read_text())["rows"] == rows


def test_the_module_is_told_what_to_do() -> None:
    suite = HeapSuite(**GIVEN, steps=20)
    assert suite.arguments("cnn", "kept 2")[1] == ["cnn", "--steps", "20", "--keep"]
    assert suite.arguments("cnn", "left 2")[1] == ["cnn", "--steps", "20"]


@pytest.mark.parametrize(
    ("changes", "text"), [({"steps": 9}, "steps=9"), ({"turns": 0}, "turns=0"), ({"cases": ["mpl"]}, "mlp")]
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HeapSuite(**{**GIVEN, **changes})


@pytest.mark.parametrize("keep", [True, False])
def test_one_case_for_real(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    told: list[int] = []
    monkeypatch.setattr(heap, "why_not_kept", lambda: None)
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: told.append(1) or True)
    row = one_heap.run(CASES["mlp"], 12, keep=keep)
    assert len(told) == keep
    assert row["before_ms"] > 0
    assert row["after_ms"] > 0
