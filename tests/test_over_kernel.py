"""A compiled optimizer is tried where torch's fused kernel is in use, and the faster of the two is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hotcompile import HotCompile, plan_compile
from lightning_hotcompile.plan.optimizers import why_not_compiled, why_not_fused
from lightning_hotcompile.run.fused_memory import FusedMemory
from lightning_hotcompile.run.fused_watch import FusedWatch
from lightning_hotcompile.swap.optimizers.fused_step import FusedStep, Stage
from lightning_hotcompile.swap.optimizers.optimizer_step import ReplacedStep, bare_step
from tests.hot import assert_same
from tests.made_up_machine import STEP_S, Machine
from tests.models import Net, fit, seeded

LONG = 400
WHOLE = "step with optimizer"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., HotCompile]:
    """On a machine on which a kernel saves 2 s of each update; what it takes is a part of a step's time."""

    def step(optimizer: torch.optim.Optimizer, timed: Callable[..., None], **options: Any) -> FusedStep:
        def told(by_kernel: bool, seconds: float, disturbed: bool) -> None:
            timed(by_kernel, 1.0 if by_kernel else 3.0, disturbed)

        return FusedStep(optimizer, told, **options)

    monkeypatch.setattr("lightning_hotcompile.run.fused_watch.FusedStep", step)

    def run(machine: Machine, steps: int = LONG, **options: Any) -> HotCompile:
        usual = {"store": str(tmp_path / "store"), "fused_optimizer": True}
        return machine.train(monkeypatch, steps, **{**usual, **options})

    return run


def is_as_it_was(machine: Machine) -> bool:
    """Whether the optimizer's step is torch's own, with what a schedule of torch's has put around it."""
    (optimizer,) = machine.model.trainer.optimizers
    return why_not_fused(optimizer) is None


def part_tried(callback: HotCompile) -> list[tuple[str, bool]]:
    return [(e["part"], e["kept"]) for e in callback.report.events if e["kind"] == "part_tried"]


@pytest.mark.parametrize("scope", ["auto", "step"])
def test_one_that_is_faster_is_kept(train: Callable[..., HotCompile], scope: str) -> None:
    machine = Machine(step=-4.0, module=1.0, optimizer=-0.1)
    callback = train(machine, scope=scope)
    report = callback.report
    assert (report.phase, report.scope) == ("steady", WHOLE)
    assert list(report.tried) == ["step", *(["module"] if scope == "auto" else []), WHOLE]
    assert part_tried(callback) == [("optimizer", True)]
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 15.9)
    assert machine.runs["optimizer"] > LONG / 4
    assert report.fused[0].kept
    assert is_as_it_was(machine)
    assert [r.kind for r in report.regions] == ["step", "optimizer"]


def test_an_optimizer_that_is_replaced_under_a_compiled_step_is_let_go(
    train: Callable[..., HotCompile],
) -> None:
    old = list[torch.optim.Optimizer]()

    class Replaces(Machine):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == LONG - 20:
                old.extend(trainer.optimizers)
                trainer.strategy.setup_optimizers(trainer)

    machine = Replaces(step=-4.0, module=1.0, optimizer=-0.1)
    report = train(machine).report
    assert report.scope == WHOLE
    assert [why_not_fused(optimizer) for optimizer in old] == [None]
    assert is_as_it_was(machine)


def test_one_that_is_slower_is_left_and_the_kernel_goes_on(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-4.0, module=1.0, optimizer=0.5)
    callback = train(machine)
    report = callback.report
    assert (report.phase, report.scope) == ("steady", "step")
    assert list(report.tried) == ["step", "module", WHOLE]
    assert part_tried(callback) == [("optimizer", False)]
    assert f"scope {WHOLE} was tried: " in report.reason
    assert report.reason.endswith("but no faster than this one when they took turns")
    assert machine.graphs["step"] == 2  # of two plans
    assert report.fused[0].runs > LONG / 2
    assert is_as_it_was(machine)


def test_one_that_cannot_be_compiled_is_left(train: Callable[..., HotCompile]) -> None:
    machine = Machine("optimizer", step=-4.0, module=1.0)
    report = train(machine, on_error="eager").report
    assert (report.phase, report.scope) == ("steady", "step")
    assert list(report.tried) == ["step", "module", WHOLE]
    assert is_as_it_was(machine)


@pytest.mark.parametrize(
    ("extra_s", "steps", "options"),
    [
        ({"step": -4.0}, 90, {}),
        ({"step": 4.0, "module": 4.0}, LONG, {}),
        ({"step": -4.0}, LONG, {"compile_optimizer": False}),
        ({"step": -4.0}, LONG, {"cost_gate": False}),
        ({"step": -4.0}, LONG, {"max_flips": 1}),
    ],
    ids=["too short", "nothing compiled is faster", "not wanted", "no cost gate", "one flip"],
)
def test_it_is_not_tried(
    train: Callable[..., HotCompile], extra_s: dict[str, float], steps: int, options: dict[str, Any]
) -> None:
    machine = Machine(optimizer=-2.0, **extra_s)
    assert WHOLE not in train(machine, steps, **options).report.tried
    assert machine.graphs["optimizer"] == 0


@pytest.mark.parametrize("optimizer_s", [-0.5, 0.5])
def test_the_next_run_begins_with_what_was_kept(train: Callable[..., HotCompile], optimizer_s: float) -> None:
    extra_s = {"step": -4.0, "module": 1.0, "optimizer": optimizer_s}
    kept = train(Machine(**extra_s)).report.scope
    machine = Machine(**extra_s)
    callback = train(machine)
    report = callback.report
    assert (report.phase, report.scope, list(report.tried)) == ("steady", kept, [kept])
    assert part_tried(callback) == []
    assert (machine.runs["optimizer"] > LONG / 2) is (optimizer_s < 0)
    assert report.fused[0].kept
    assert is_as_it_was(machine)


def test_what_both_save_is_booked(train: Callable[..., HotCompile]) -> None:
    """Without the kernel a step would take 22 s: that, too, is what the compiled optimizer saves."""
    machine = Machine(step=-4.0, optimizer=-1.0)
    report = train(machine, scope="step").report
    assert report.speedup is not None
    (found,) = report.fused
    in_steps = (STEP_S - 15.0) * machine.runs["optimizer"]
    by_updates = 2.0 * (found.runs + machine.runs["optimizer"])
    before = 4.0 * (machine.runs["step"] - machine.runs["optimizer"])
    assert report.saved_s == pytest.approx(in_steps + by_updates + before, rel=0.02)


def test_weights_are_those_of_a_run_without_the_callback(train: Callable[..., HotCompile]) -> None:
    """Its learning rate follows a schedule: a tensor for the compiled update, a number for the kernel."""
    plain = seeded(Net)
    fit(plain, max_steps=LONG, max_epochs=-1)
    machine = Machine(step=-4.0, optimizer=-1.0)
    report = train(machine).report
    assert report.scope == WHOLE
    assert machine.graphs["optimizer"] == 1
    assert report.fused[0].runs > 20
    assert_same(plain, machine.model)


class TestOneOverTheOther:
    """A compiled step over the one that has the kernel do the update."""

    @pytest.fixture
    def optimizer(self) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        return torch.optim.AdamW([weight], lr=0.1)

    def put_another(self, optimizer: torch.optim.Optimizer) -> Callable[[], bool]:
        update = functools.partial(bare_step(type(optimizer)), optimizer)
        return ReplacedStep(optimizer, update, lambda: False).put()

    def test_it_may_be_compiled(self, optimizer: torch.optim.Optimizer) -> None:
        FusedStep(optimizer, lambda *_: None).put()
        assert why_not_compiled(optimizer) is None

    def test_not_a_second_time(self, optimizer: torch.optim.Optimizer) -> None:
        FusedStep(optimizer, lambda *_: None).put()
        self.put_another(optimizer)
        assert "wrapped" in str(why_not_compiled(optimizer))

    def test_not_if_somebody_has_wrapped_it(self, optimizer: torch.optim.Optimizer) -> None:
        FusedStep(optimizer, lambda *_: None).put()
        ours = optimizer.step
        functools.update_wrapper(theirs := lambda *args: ours(*args), ours)
        vars(optimizer)["step"] = theirs
        assert "wrapped" in str(why_not_compiled(optimizer))

    def test_no_kernel_goes_over_a_compiled_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.put_another(optimizer)
        assert why_not_fused(optimizer) == "it is compiled"

    def test_what_is_left_while_it_lies_under_another_goes_at_the_end(
        self, optimizer: torch.optim.Optimizer
    ) -> None:
        watch = FusedWatch([optimizer], wanted=True, after=0, min_speedup=1.02, memory=FusedMemory(None))
        watch.begin_step(1, lambda: True)
        (trial,) = watch._on_trial
        undo = self.put_another(optimizer)
        trial.step.leave("of no use")
        assert trial.step.stage is Stage.LEFT
        assert undo()
        assert "step" in vars(optimizer)
        watch.finish()
        assert "step" not in vars(optimizer)


def test_the_plan_with_all_optimizers_is_more_than_the_one_without() -> None:
    model = seeded(Net)
    plan = functools.partial(plan_compile, model, optimizers=model.configure_optimizers()[0])
    part, whole = plan(fused_optimizer=True), plan(fused_optimizer=False)
    assert whole.is_more_than(part)
    assert not part.is_more_than(whole)
    assert not whole.is_more_than(whole)
    assert not whole.is_more_than(plan(scope="module", fused_optimizer=True))


@pytest.mark.slow
def test_for_real(cheap_compiles: None, tmp_path: Path) -> None:
    """Inductor and the real clock: whichever is faster, the weights are those of plain training."""
    plain, model = seeded(Net), seeded(Net)
    options = {"threshold": 3, "prewarm": False, "scope": "step", "min_speedup": 0.01, "on_error": "raise"}
    callback = HotCompile(store=str(tmp_path / "store"), **options)
    fit(plain, max_steps=400, max_epochs=-1)
    trainer = fit(model, [callback], max_steps=400, max_epochs=-1)
    report = callback.report
    assert report.fused[0].kept
    assert list(report.tried) == ["step", WHOLE]
    assert report.phase == "steady"
    ((_, kept),) = part_tried(callback)
    assert report.scope == (WHOLE if kept else "step")
    assert "NOT right" not in report.parity
    assert why_not_fused(trainer.optimizers[0]) is None
    assert_same(plain, model, tolerance=1e-2)
