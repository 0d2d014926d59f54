"""Two plans that no ratio to eager tells apart take turns, and the faster one is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_hook

from lightning_hotcompile import HotCompile
from lightning_hotcompile.run.race import LOOKS
from tests.made_up_machine import STEP_S, Machine
from tests.models import Net

RUNS = 5
"""Of compiled modules in a step with scope ``module``."""

LONG = 1200


class Noisy(Machine):
    """Its steps take longer or shorter by up to so many seconds."""

    def __init__(self, noise_s: float, *broken: str, **extra_s: float) -> None:
        super().__init__(*broken, **extra_s)
        self._by_chance, self._noise_s = random.Random(0), noise_s

    def on_before_zero_grad(self, *args: Any) -> None:
        """Once in each step."""
        super().on_before_zero_grad(*args)
        self.now += self._by_chance.uniform(-self._noise_s, self._noise_s)


def step_and_module(step_s: float, module_s: float) -> dict[str, float]:
    """What compiled parts take, so that a step of either scope takes so long."""
    return {"step": step_s - STEP_S, "module": (module_s - STEP_S) / RUNS}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., HotCompile]:
    def run(machine: Machine, steps: int = LONG, **options: Any) -> HotCompile:
        settings = {"store": str(tmp_path / "store"), "compile_optimizer": False, **options}
        return machine.train(monkeypatch, steps, **settings)

    return run


def raced(callback: HotCompile) -> list[tuple[str, str]]:
    return [(e["kept"], e["left"]) for e in callback.report.events if e["kind"] == "scopes_raced"]


@pytest.mark.parametrize(
    ("step_s", "module_s", "kept"), [(10.0, 9.7, "module"), (9.7, 10.0, "step")], ids=["later", "first"]
)
def test_the_faster_one_is_kept_where_the_ratios_to_eager_do_not_tell(
    train: Callable[..., HotCompile], step_s: float, module_s: float, kept: str
) -> None:
    callback = train(Noisy(2.0, **step_and_module(step_s, module_s)))
    report = callback.report
    ((winner, loser),) = raced(callback)
    assert (report.phase, report.scope, winner) == ("steady", kept, kept)
    assert {winner, loser} == set(report.tried) == {"step", "module"}
    assert f"taking turns, scope {kept} was 1.0" in report.reason
    (event,) = (e for e in report.events if e["kind"] == "scopes_raced")
    assert event["low"] <= max(step_s, module_s) / min(step_s, module_s) <= event["high"]
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / min(step_s, module_s), rel=0.1)


def test_who_is_as_fast_does_not_take_the_place_of_the_first(train: Callable[..., HotCompile]) -> None:
    callback = train(Noisy(0.2, **step_and_module(10.0, 10.0)))
    assert raced(callback) == [("step", "module")]
    assert callback.report.scope == "step"
    assert "taking turns, scope module was about as fast" in callback.report.reason


def test_two_that_the_ratios_tell_apart_take_no_turns(train: Callable[..., HotCompile]) -> None:
    callback = train(Noisy(0.4, **step_and_module(10.0, 8.0)))
    assert raced(callback) == []
    assert callback.report.scope == "module"


def test_the_turns_are_half_and_half_and_compile_nothing(train: Callable[..., HotCompile]) -> None:
    machine = Noisy(2.0, **step_and_module(10.0, 9.7))
    callback = train(machine)
    begin = begin_of_race(callback)
    (event,) = (e for e in callback.report.events if e["kind"] == "scopes_raced")
    assert event["n"] in LOOKS
    assert 2 * event["n"] <= event["step"] - begin <= 2 * event["n"] + 4
    assert machine.graphs["step"] == 1
    assert not any(e["kind"] in ("recompiled", "fallback") for e in callback.report.events)


def begin_of_race(callback: HotCompile) -> int:
    changes = [e for e in callback.report.events if e["kind"] == "phase_changed"]
    (begin,) = (e["step"] for e in changes if e["phase"] == "refining")
    return int(begin)


def test_an_end_in_between_leaves_the_word_to_the_one_that_was_known_to_be_good(
    train: Callable[..., HotCompile], tmp_path: Path
) -> None:
    begin = begin_of_race(train(Noisy(2.0, **step_and_module(10.0, 9.7))))
    for name, steps in (("odd", begin + 41), ("even", begin + 42)):
        store = str(tmp_path / name)
        machine = Noisy(2.0, **step_and_module(10.0, 9.7))
        report = train(machine, steps, store=store).report
        assert (report.phase, report.scope, list(report.tried)) == ("steady", "step", ["step"])
        assert "forward" not in vars(machine.model)
        again = train(Noisy(2.0, **step_and_module(10.0, 9.7)), store=store)
        assert list(again.report.tried) == ["step", "module"], "what was not decided may be tried again"
        assert raced(again) == [("module", "step")]


class Weighted(Net):
    """Its loss has a weight that is a constant of a graph of the whole step."""

    weight_of_loss = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight_of_loss * super().training_step(batch, batch_idx)


class Changes(Noisy):
    """The weight changes once."""

    net = Weighted
    at = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            pl_module.weight_of_loss = 2.0


def test_one_whose_code_no_longer_fits_has_lost(train: Callable[..., HotCompile], tmp_path: Path) -> None:
    begin = begin_of_race(train(Changes(2.0, **step_and_module(9.7, 10.0)), store=str(tmp_path / "first")))
    machine = Changes(2.0, **step_and_module(9.7, 10.0))
    machine.at = begin + 20
    callback = train(machine)
    report = callback.report
    assert (report.phase, report.scope) == ("steady", "module")
    assert "scope step was tried: its compiled code did not run in 3 turns in a row" in report.reason
    assert raced(callback) == []
    (end,) = (e["step"] for e in report.events if e["kind"] == "phase_changed" and "3 turns" in e["reason"])
    assert machine.at < end <= machine.at + 12


def test_who_keeps_compiled_code_out_decides_nothing(
    train: Callable[..., HotCompile], tmp_path: Path
) -> None:
    class Hooks(Noisy):
        at = -1000

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == self.at:
                self.hook = register_module_forward_hook(lambda *_: None)
            if trainer.global_step == self.at + 30:
                self.hook.remove()

    begin = begin_of_race(train(Hooks(2.0, **step_and_module(9.7, 10.0)), store=str(tmp_path / "first")))
    machine = Hooks(2.0, **step_and_module(9.7, 10.0))
    machine.at = begin + 20
    callback = train(machine)
    report = callback.report
    assert (report.phase, report.scope, list(report.tried)) == ("steady", "step", ["step"])
    assert raced(callback) == []
    assert machine.runs["step"] > LONG / 2


def test_one_that_fails_in_between_has_lost(
    train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Noisy(2.0, **step_and_module(10.0, 9.7))
    compiled = machine.backend

    def breaks_late(graph: Any, inputs: Any, mode: str | None = None) -> Callable[..., Any]:
        run, calls = compiled(graph, inputs, mode), 0

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if machine.graphs["module"] and calls > 60 and "cross_entropy" in str(graph.graph):
                raise RuntimeError("broken in the race")
            return run(*args)

        return counted

    monkeypatch.setattr(machine, "backend", breaks_late)
    report = train(machine, on_error="eager").report
    assert (report.phase, report.scope) == ("steady", "module")
    assert "broken in the race" in report.reason


def test_the_next_run_begins_with_the_winner(train: Callable[..., HotCompile]) -> None:
    train(Noisy(2.0, **step_and_module(10.0, 9.7)))
    callback = train(Noisy(2.0, **step_and_module(10.0, 9.7)), 60)
    assert (list(callback.report.tried), raced(callback)) == (["module"], [])


def test_a_unit_of_several_batches_has_one_of_them(train: Callable[..., HotCompile]) -> None:
    class Looks(Noisy):
        accumulates = 2
        used: dict[int, list[tuple[str, ...]]]

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.unit = trainer.global_step
            self.before = self.runs.copy()

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            grown = self.runs - self.before
            parts = tuple(part for part in ("step", "module") if grown[part])
            self.used.setdefault(self.unit, []).append(parts)

    machine = Looks(2.0, **step_and_module(15.0, 14.8))
    machine.used = {}
    callback = train(machine, 400)
    assert raced(callback)
    seen = {tuple(parts) for parts in machine.used.values() if len(parts) == 2}
    step, module = ("step",), ("module",)
    assert {(step, step), (module, module)} <= seen
    assert not [parts for parts in machine.used.values() if set(parts) == {step, module}]
