"""The suite ``steady`` with a runner that knows the ratios, and once for real."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console

from lightning_hotcompile.bench import apart, one_side, one_steady
from lightning_hotcompile.bench.arms import fuse_optimizers
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.one_steady import InTurns, Muted, Way
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.bench.steady_suite import SteadySuite
from lightning_hotcompile.errors import ConfigError

RATIOS: dict[str, dict[str, Any]] = {
    "mlp": {"eager": 1.001, "step": 1.2, "step+optimizer": 1.3},
    "cnn": {"eager": 1.7, "step": 1.002, "step+optimizer": 0.97},
    "gan": {"eager": 0.9},
}
GIVEN: dict[str, Any] = {
    "cases": list(RATIOS),
    "quick_cases": ["mlp"],
    "arms": ["eager", "step", "step+optimizer"],
    "options": {"threshold": 3},
}


def measured(case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    assert options == {"threshold": 3}
    ratio = RATIOS[case].get(plan)
    if isinstance(ratio, RunFailed):
        raise ratio
    if ratio is None:
        raise RunFailed("NotImplementedError: manual optimization")
    phase = "reverted" if case == "mlp" else "steady"
    return {
        "phase": phase, "reason": f"{phase}, it says", "scope": "step",
        "ours_ms": 10.0, "theirs_ms": 10 * ratio, "pairs": 30,
        "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01,
    }  # fmt: skip


def page_of(folder: Path, **changes: Any) -> tuple[str, str]:
    told = io.StringIO()
    suite = SteadySuite(**{**GIVEN, **changes})
    suite.run(folder, runner=measured, console=Console(file=told, width=200), command="test")
    return (folder / "steady.md").read_text(), told.getvalue()


def test_the_best_way_by_hand_is_the_one_to_compare_with(tmp_path: Path) -> None:
    page, told = page_of(tmp_path)
    assert (
        "| mlp | reverted | 1.001 [0.991, 1.011] | 1.200 [1.190, 1.210] | 1.300 [1.290, 1.310] | 1.200 |"
        in page
    )
    assert page.count("not possible") == 2
    assert "of eager / ours: 1.153 (3 cases)" in page, "the third root of 1.001 x 1.7 x 0.9"
    assert "best by hand / ours: 1.079 (2 cases)" in page, "the root of 1.2 x 0.97: gan has no way by hand"
    best_of_all = "best of these and eager / ours: 0.985 (2 cases)"
    assert best_of_all in page, "the root of 1.001 x 0.97: by hand the mlp is slower than eager"
    assert "cnn, steady: 0.970 [0.960, 0.980] against step+optimizer" in told
    assert "gan, step: failed: NotImplementedError: manual optimization" in told


def test_what_misses_a_goal_is_named_with_its_reason(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path)
    missed = page.split("## Below a goal")[1].split("##")[0].strip().splitlines()
    assert missed == [
        "- cnn: 0.970 [0.960, 0.980] against step+optimizer (9.7 ms, ours 10 ms); steady: steady, it says",
        "- gan: 0.900 [0.890, 0.910] against eager; steady: steady, it says",
    ]
    page, _ = page_of(tmp_path / "other", cases=["mlp"])
    assert "## Below a goal\n\nNone." in page


def test_a_page_shows_the_arms_of_an_earlier_command_too(tmp_path: Path) -> None:
    page_of(tmp_path, cases=["mlp"])
    page, _ = page_of(tmp_path, cases=["cnn"], arms=["eager"])
    assert "| case | callback | eager | step | step+optimizer | of the best by hand |" in page
    assert "| cnn | steady | 1.700 [1.690, 1.710] |  |  |  |" in page
    assert "of eager / ours: 1.304 (2 cases)" in page
    assert "best by hand / ours: 1.200 (1 case)." in page
    assert "of these and eager / ours: 1.001 (1 case)." in page


def test_a_row_that_failed_says_why_until_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = RATIOS["cnn"]
    monkeypatch.setitem(RATIOS, "cnn", {"eager": 1.7, "step": RunFailed("it was ended by signal 9")})
    page, _ = page_of(tmp_path, cases=["cnn"])
    assert "| cnn | steady | 1.700 [1.690, 1.710] | failed | not possible |  |" in page
    assert "## Failed, to be tried again\n\n- cnn, step: it was ended by signal 9\n\n## Where" in page
    monkeypatch.setitem(RATIOS, "cnn", ratios)
    page, told = page_of(tmp_path, cases=["cnn"])
    assert told.splitlines() == ["cnn, steady: 1.002 [0.992, 1.012] against step"]
    assert "| cnn | steady | 1.700 [1.690, 1.710] | 1.002 [0.992, 1.012] | not possible | 1.002 |" in page
    assert "Failed" not in page


def test_a_callback_that_never_decided_is_told_apart(tmp_path: Path) -> None:
    def undecided(*_: Any) -> dict[str, Any]:
        return {"phase": "observing", "reason": "too short", "ours_ms": None, "ratio": None}

    SteadySuite(**GIVEN).run(tmp_path, runner=undecided, console=Console(file=io.StringIO()))
    page = (tmp_path / "steady.md").read_text()
    assert "| mlp |  | not measured | not measured | not measured |  |" in page


def test_files_say_the_same(tmp_path: Path) -> None:
    page_of(tmp_path)
    rows = json.loads((tmp_path / "steady.json").read_text())["rows"]
    assert [(row["case"], row["plan"]) for row in rows] == [(c, a) for c in RATIOS for a in GIVEN["arms"]]
    assert list(pd.read_csv(tmp_path / "steady.csv")["case"]) == [row["case"] for row in rows]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cases": ["mpl"]}, "'mpl'.*mlp"),
        ({"arms": ["stpe"]}, "'stpe'.*step"),
        ({"arms": ["witout"]}, "'witout'.*without"),
        ({"blocks": 3}, "blocks=3"),
        ({"pairs": 0}, "pairs=0"),
        ({"steps": 9}, "steps=9"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SteadySuite(**{**GIVEN, **changes})


def test_a_run_without_the_callback_is_no_way_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RATIOS["cnn"], "without", 1.9)
    monkeypatch.setitem(RATIOS["mlp"], "without", 0.9)
    page, _ = page_of(tmp_path, cases=["mlp", "cnn"], arms=["eager", "without", "step"])
    assert "| case | callback | eager | without | step | of the best by hand |" in page
    assert "1.304 (2 cases). Geometric mean of a run without the callback / ours: 1.308 (2 cases)." in page
    assert "best by hand / ours: 1.097 (2 cases)" in page, "the root of 1.2 x 1.002"
    missed = page.split("## Below a goal")[1].split("##")[0].strip()
    assert missed == (
        "- mlp: 0.900 [0.890, 0.910] against a run without the callback; reverted: reverted, it says"
    )


def test_processes_with_and_without_the_callback_take_turns() -> None:
    order = []
    times = {True: iter([10.0, 20.0, 11.0]), False: iter([15.0, 22.0, 22.0])}

    def run(callback: bool) -> dict[str, Any]:
        order.append(callback)
        told = {"phase": "steady", "reason": f"number {len(order)}", "scope": "step"} if callback else {}
        return {"step_ms": next(times[callback]), **told}

    assert apart.in_pairs(run, 3) == {
        "phase": "steady", "reason": "number 1", "scope": "step",
        "ours_ms": 11.0, "theirs_ms": 22.0, "ratio": 1.5, "low": 1.1, "high": 2.0, "pairs": 3,
    }  # fmt: skip
    assert order == [True, False, False, True, True, False]


def test_processes_apart_share_the_compilers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(apart, "run_in_process", lambda *given: seen.append(given) or {"step_ms": 1.0})
    run = apart.side("mlp", 50, {"threshold": 3}, tmp_path, 1)
    assert run(False) == run(True) == {"step_ms": 1.0}
    common = ["mlp", "--steps", "50", "--threads", "1", "--options", '{"threshold": 3}']
    module = "lightning_hotcompile.bench.one_side"
    assert seen == [(module, common, tmp_path, 1), (module, [*common, "--callback"], tmp_path, 1)]


@pytest.mark.parametrize("with_it", [False, True])
def test_a_side_for_real(with_it: bool) -> None:
    found = one_side.run(CASES["mlp"], 30, {**OPTIONS, "scope": "step"} if with_it else None)
    assert found["step_ms"] > 0
    if with_it:
        assert (found["phase"], found["scope"]) == ("steady", "step")
        assert found["reason"]
    else:
        assert set(found) == {"step_ms"}
    json.dumps(found)


def test_steps_are_timed_once_the_callback_has_decided() -> None:
    hot: Any = SimpleNamespace(is_undecided=True)
    trainer: Any = SimpleNamespace(should_stop=False, global_step=5)
    timed = one_side.TimedSteps(hot, 10)
    for _ in range(5):
        timed.on_train_batch_start(trainer)
    assert timed.step_s is None
    hot.is_undecided = False
    for left in range(10 + one_side.LEFT_OUT, 0, -1):
        timed.on_train_batch_start(trainer)
        assert not trainer.should_stop, left
    timed.on_train_batch_start(trainer)
    assert trainer.should_stop
    assert timed.step_s is not None


def test_a_callback_that_never_decides_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_side, "MOST_STEPS", 8)
    with pytest.raises(RuntimeError, match="not decided after 8 steps"):
        one_side.run(CASES["mlp"], 10, {**OPTIONS, "threshold": 1000})


OPTIONS: dict[str, Any] = {
    "backend": "aot_eager", "cost_gate": False, "min_speedup": 0.0, "store": None, "prewarm": False,
    "threshold": 3,
}  # fmt: skip


@pytest.mark.parametrize("arm", ["eager", "step", "step+fused"])
def test_both_ways_for_real(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", compiled_cheaply(torch.compile))
    row = one_steady.run(CASES["mlp"], arm, 16, {**OPTIONS, "scope": "step"})
    assert (row["phase"], row["pairs"]) == ("steady", 8)
    assert row["low"] <= row["ratio"] <= row["high"]
    json.dumps(row)


def compiled_cheaply(original: Any) -> Any:
    return lambda *args, **kwargs: original(*args, **{"backend": "eager", **kwargs})


def test_each_way_has_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code of the callback runs in its blocks only, and its hooks see no other step."""
    monkeypatch.setattr(torch, "compile", compiled_cheaply(torch.compile))
    seen: list[tuple[bool, bool, int]] = []

    class Watched(InTurns):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            session = hot._runs["train"].session
            installed = "training_step" in vars(module)
            if self._steps > 2:
                seen.append((hot.muted, installed, session.flip.installation.witness.watch.total_runs))

    hot = Muted(**{**OPTIONS, "scope": "step", "compile_optimizer": False})
    monkeypatch.setattr(one_steady, "Muted", lambda **_: hot)
    monkeypatch.setattr(one_steady, "InTurns", Watched)
    one_steady.run(CASES["mlp"], "eager", 16, {})
    assert {(muted, installed) for muted, installed, _ in seen} == {(True, False), (False, True)}
    for (_, _, before), (muted, _, runs) in pairwise(seen):
        assert (runs == before) is muted
    assert hot.report.steps == sum(not muted for muted, _, _ in seen) + first_steps(hot)


def first_steps(hot: Muted) -> int:
    """Steps before the callback had decided, and the two that were not written down."""
    decided: int = next(e["step"] for e in hot.report.events if e.get("phase") == "steady")
    return decided + 3


def test_the_arm_with_torchs_fused_optimizer_has_it_in_its_own_steps_only() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lightning_module=torch.nn.Linear(1, 1))
    (group,) = optimizer.param_groups
    ours = Way.now(trainer)
    fuse_optimizers(trainer)
    theirs = Way.now(trainer)
    seen = []
    for way in (theirs, ours, theirs, ours):
        way.put(trainer)
        weight.grad = torch.ones(3)
        optimizer.step()
        seen.append((group["fused"], group["foreach"], group["lr"]))
    assert seen == 2 * [(True, False, 0.1), (None, None, 0.1)]


def test_an_optimizer_without_a_fused_kernel_cannot_run_that_arm() -> None:
    trainer: Any = SimpleNamespace(optimizers=[torch.optim.RMSprop([torch.nn.Parameter(torch.ones(3))])])
    with pytest.raises(NotImplementedError, match="no fused kernel"):
        fuse_optimizers(trainer)


def test_turns_begin_once_a_fused_optimizer_is_decided_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", compiled_cheaply(torch.compile))
    first = []

    class Watched(InTurns):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            super().on_train_batch_start(trainer, *rest)
            if self._steps == 1:
                first.append([e["kind"] for e in hot.report.events].count("fused_tried"))

    hot = Muted(**{**OPTIONS, "scope": "step"})
    monkeypatch.setattr(one_steady, "Muted", lambda **_: hot)
    monkeypatch.setattr(one_steady, "InTurns", Watched)
    one_steady.run(CASES["text"], "eager", 12, {})
    assert first == [1]
    assert [each.name for each in hot.report.fused] == ["optimizer 0"]
