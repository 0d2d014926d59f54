"""Further plans are tried where they may pay, and the best one is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile import HotCompile
from lightning_hotcompile.plan import compile_cost
from lightning_hotcompile.receipt.ledger import Ledger, PairedUnits, StepRecord
from lightning_hotcompile.rounds import Rounds
from lightning_hotcompile.watch.clock import StepTime
from tests.hot import assert_same
from tests.made_up_machine import STEP_S, Machine
from tests.models import Net, fit, seeded

LONG = 250
MODULES = 5
"""Runs of compiled modules in a step of the model with scope ``module``."""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., HotCompile]:
    def run(machine: Machine, steps: int = LONG, **options: Any) -> HotCompile:
        return machine.train(monkeypatch, steps, **{"store": str(tmp_path / "store"), **options})

    return run


def test_a_plan_that_is_faster_is_kept(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "module")
    assert report.tried == pytest.approx({"step": STEP_S / 17, "module": STEP_S / (STEP_S - 2 * MODULES - 1)})
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 9)
    assert any("step 1.18x, module 2.22x; module is in use" in note for note in report.notes)


def test_a_plan_that_is_slower_is_left_and_the_one_before_goes_on_without_a_compile(
    train: Callable[..., HotCompile],
) -> None:
    machine = Machine(step=-6.0, module=1.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "step")
    assert list(report.tried) == ["step", "module"]
    assert "scope module was tried" in report.reason
    assert machine.graphs["step"] == 1
    assert machine.runs["step"] > LONG / 2
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 13)


def test_a_plan_that_helps_where_the_first_did_not(train: Callable[..., HotCompile]) -> None:
    report = train(Machine(step=4.0, module=-2.0, optimizer=2.0)).report
    assert report.tried == pytest.approx({"step": 1.0, "module": STEP_S / 10})
    assert (report.phase, report.scope) == ("steady", "module")
    assert report.eager_parts == ("optimizer",)


def test_none_that_helps(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=4.0, module=1.0, optimizer=2.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("reverted", "step")
    assert report.tried == {"step": 1.0, "module": 1.0}


def test_a_plan_that_cannot_be_compiled_is_left(train: Callable[..., HotCompile]) -> None:
    machine = Machine("module", step=-6.0, optimizer=-1.0)
    report = train(machine, on_error="eager").report
    assert (report.phase, report.scope) == ("steady", "step")
    assert report.tried == pytest.approx({"step": STEP_S / 13, "module": STEP_S / 19})  # by the optimizer
    assert machine.runs["step"] > LONG / 2


@pytest.mark.parametrize(
    ("steps", "options"),
    [(80, {}), (LONG, {"scope": "step"}), (LONG, {"cost_gate": False}), (LONG, {"min_speedup": 0.0})],
    ids=["too few steps are left", "the scope was asked for", "no cost gate", "whatever it gains"],
)
def test_no_other_plan_is_tried(
    train: Callable[..., HotCompile], steps: int, options: dict[str, Any]
) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    assert list(train(machine, steps, **options).report.tried) == ["step"]
    assert machine.graphs["module"] == 0


def test_the_next_run_begins_with_the_best_one_and_tries_no_other(train: Callable[..., HotCompile]) -> None:
    train(Machine(step=-2.0, module=-2.0, optimizer=-1.0))
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "module")
    assert machine.graphs["step"] == 0
    assert list(report.tried) == ["module"]


def test_a_run_that_ends_in_a_trial_reports_and_remembers_what_it_had_before(
    train: Callable[..., HotCompile],
) -> None:
    machine = Machine(step=-6.0)  # a part that makes no difference takes long to be tried
    callback = train(machine, 170)
    report = callback.report
    assert [e["phase"] for e in report.events if e["kind"] == "phase_changed"][-1] == "refining"
    assert (report.phase, report.scope, list(report.tried)) == ("steady", "step", ["step"])
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 14)
    again = train(machine, 170).report
    assert "the measured speed-up of 1.43x" in again.decision


def test_a_trial_whose_code_does_not_fit_leaves_the_plan_before_alone(
    train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_up = Rounds._take_up

    def after_misses(rounds: Rounds, best: Any, track: Any, reason: str) -> None:
        track.failure, track.recompile_episodes = "compiled code did not fit", 4
        take_up(rounds, best, track, reason)

    monkeypatch.setattr(Rounds, "_take_up", after_misses)
    report = train(Machine(step=-6.0, module=1.0, optimizer=-1.0)).report
    assert (report.phase, report.scope) == ("steady", "step")


def test_steps_of_a_slower_plan_are_not_booked_at_the_gain_of_the_one_that_is_kept() -> None:
    ledger = Ledger()
    for eager_s, compiled_s in ((3.0, 1.0), (1.0, 2.0)):
        ledger.pairs = PairedUnits()
        for i in range(20):
            compiled = i % 2 == 1
            record = StepRecord(phase="settling", compiled=compiled, pairs=ledger.pairs)
            seconds = compiled_s if compiled else eager_s
            ledger.add(StepTime(tag=record, seconds=seconds, wait_seconds=0.0), record)
        ledger.end_round()
    assert ledger.saved_s == pytest.approx(10 * (3.0 - 1.0) + 10 * (1.0 - 2.0))


def test_max_flips_bounds_the_plans_too(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    assert list(train(machine, max_flips=1).report.tried) == ["step"]


@pytest.mark.parametrize("options", [{"scope": "step"}, {"compile_optimizer": True}], ids=str)
def test_a_run_that_asks_for_something_else_knows_nothing_of_what_auto_has_found(
    train: Callable[..., HotCompile], options: dict[str, Any]
) -> None:
    train(Machine(step=-2.0, module=-2.0, optimizer=3.0))
    report = train(Machine(step=-2.0, module=-2.0, optimizer=3.0), 60, **options).report
    flips = [e["reason"] for e in report.events if e["kind"] == "phase_changed" and e["phase"] == "flipping"]
    assert "an assumed speed-up" in flips[0]


@pytest.mark.slow
def test_two_plans_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor and the real clock: whichever plan wins, both were measured, and nothing is lost."""
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 1e-6)
    monkeypatch.setattr(compile_cost, "TOOLCHAIN_S", 0.0)
    monkeypatch.setattr(
        compile_cost, "SECONDS_PER_REGION", dict.fromkeys(compile_cost.SECONDS_PER_REGION, 1e-6)
    )
    monkeypatch.setattr(compile_cost, "SECONDS_PER_TENSOR", 0.0)
    plain, model = seeded(Net), seeded(Net)
    callback = HotCompile(threshold=3, prewarm=False, store=str(tmp_path / "store"), on_error="raise")
    fit(plain, max_steps=400, max_epochs=-1)
    fit(model, [callback], max_steps=400, max_epochs=-1)
    report = callback.report
    assert list(report.tried) == ["step", "module"]
    assert report.phase in ("steady", "reverted")
    assert report.tried[report.scope] == max(report.tried.values())
    assert "NOT right" not in report.parity
    assert_same(plain, model, tolerance=1e-2)


def test_weights_are_those_of_a_run_without_the_callback(train: Callable[..., HotCompile]) -> None:
    plain = seeded(Net)
    fit(plain, max_steps=LONG, max_epochs=-1)
    machine = Machine(step=-6.0, module=1.0, optimizer=-1.0)
    assert list(train(machine).report.tried) == ["step", "module"]
    assert_same(plain, machine.model)
