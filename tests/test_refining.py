"""The compiled optimizer is tried with and without, on a clock that says what each part takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile import HotCompile
from tests.hot import assert_same
from tests.made_up_machine import Machine
from tests.models import Net, fit, seeded

LONG = 130


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HotCompile]:
    def run(machine: Machine, steps: int = LONG, **options: Any) -> HotCompile:
        return machine.train(monkeypatch, steps, **{"cost_gate": False, **options})

    return run


def phases(callback: HotCompile) -> list[str]:
    return [e["phase"] for e in callback.report.events if e["kind"] == "phase_changed"]


def tried(callback: HotCompile) -> list[tuple[str, bool]]:
    return [(e["part"], e["kept"]) for e in callback.report.events if e["kind"] == "part_tried"]


def test_two_parts_that_help_are_kept(train: Callable[..., HotCompile]) -> None:
    callback = train(Machine(step=-6.0, optimizer=-3.0))
    assert callback.report.phase == "steady"
    assert tried(callback) == [("optimizer", True)]
    assert callback.report.speedup is not None
    assert callback.report.speedup.value == pytest.approx(20 / 11)
    assert callback.report.eager_parts == ()


def test_an_optimizer_that_is_slower_compiled_is_eager_again(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-6.0, optimizer=3.0)
    callback = train(machine)
    report = callback.report
    assert report.phase == "steady"
    assert tried(callback) == [("optimizer", False)]
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(20 / 14)
    assert report.eager_parts == ("optimizer",)
    assert machine.runs["step"] > machine.runs["optimizer"] + 30
    (note,) = [r.note for r in report.regions if r.kind == "optimizer"]
    assert "eager again: a step is 1.21x faster if optimizer is not compiled" in note


def test_a_step_that_is_slower_compiled_takes_an_optimizer_that_helps_with_it(
    train: Callable[..., HotCompile],
) -> None:
    callback = train(Machine(step=8.0, optimizer=-5.0))
    assert phases(callback)[-2:] == ["refining", "reverted"]
    assert tried(callback) == [("optimizer", True)]


def test_two_parts_that_hurt_are_taken_back_one_after_the_other(train: Callable[..., HotCompile]) -> None:
    callback = train(Machine(step=4.0, optimizer=2.0))
    assert phases(callback)[-2:] == ["settling", "reverted"]
    assert callback.report.phase == "reverted"


@pytest.mark.parametrize("options", [{"compile_optimizer": True}, {"min_speedup": 0.0}])
def test_what_was_asked_for_is_left_as_it_is(
    train: Callable[..., HotCompile], options: dict[str, Any]
) -> None:
    callback = train(Machine(step=-6.0, optimizer=3.0), **options)
    assert callback.report.phase == "steady"
    assert tried(callback) == []


def test_the_next_run_leaves_out_what_this_one_has_found(
    train: Callable[..., HotCompile], tmp_path: Path
) -> None:
    options = {"store": str(tmp_path / "store"), "cost_gate": True, "scope": "step"}
    train(Machine(step=-6.0, optimizer=3.0), **options)
    machine = Machine(step=-6.0, optimizer=3.0)
    callback = train(machine, **options)
    assert callback.report.phase == "steady"
    assert machine.runs["optimizer"] == 0
    assert callback.report.eager_parts == ("optimizer",)
    assert tried(callback) == []


@pytest.mark.parametrize(
    ("wait_s", "text"), [(20.0, "49% of the time went by between the steps"), (2.0, None)]
)
def test_a_run_that_waits_for_its_data_is_told_so(
    train: Callable[..., HotCompile], wait_s: float, text: str | None
) -> None:
    notes = train(Machine(wait_s=wait_s), 20).report.notes
    found = [note for note in notes if "between the steps" in note]
    assert len(found) == (text is not None)
    assert text is None or text in found[0]


def test_weights_are_those_of_a_run_without_the_callback(train: Callable[..., HotCompile]) -> None:
    plain = seeded(Net)
    fit(plain, max_steps=LONG, max_epochs=-1)
    machine = Machine(step=-6.0, optimizer=3.0)
    train(machine)
    assert_same(plain, machine.model)
