"""A training whose optimizer has a fused kernel uses it where it is faster, and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hotcompile import HotCompile
from lightning_hotcompile.fused_watch import LOOKS, FusedWatch
from lightning_hotcompile.plan.optimizers import why_not_fused
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.swap.fused_step import FusedStep, Stage
from tests.hot import assert_same
from tests.models import Net, fit, loader, make_trainer, seeded

Timed = Callable[[bool, float, bool], None]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets an update take 1 s by the kernel, and as much as is asked for by the loop."""

    def make(loop_s: float) -> None:
        def step(optimizer: torch.optim.Optimizer, timed: Timed) -> FusedStep:
            def told(by_kernel: bool, seconds: float, disturbed: bool) -> None:
                timed(by_kernel, 1.0 if by_kernel else loop_s, disturbed)

            return FusedStep(optimizer, told)

        monkeypatch.setattr("lightning_hotcompile.fused_watch.FusedStep", step)

    return make


@pytest.fixture
def three_times_faster(made_up: Callable[[float], None]) -> None:
    made_up(3.0)


@pytest.fixture
def no_faster(made_up: Callable[[float], None]) -> None:
    made_up(1.01)


def quiet(**options: Any) -> HotCompile:
    """Never compiles, since that would not pay."""
    return HotCompile(**{"threshold": 5, "store": None, "on_error": "raise", **options})


def train(callback: HotCompile, model: pl.LightningModule | None = None, **options: Any) -> Any:
    model = model if model is not None else seeded(Net)
    trainer = fit(model, [callback], max_epochs=6, **options)
    return model, trainer


def decided(report: Report) -> list[dict[str, Any]]:
    return [dict(e) for e in report.events if e["kind"] == "fused_tried"]


@pytest.mark.usefixtures("three_times_faster")
class TestKept:
    def test_the_training_ends_with_the_same_weights(self) -> None:
        plain = seeded(Net)
        fit(plain, max_epochs=6)
        callback = quiet()
        model, trainer = train(callback)
        assert_same(model, plain, 1e-5)
        (found,) = callback.report.fused
        assert (found.kept, found.class_name, found.name) == (True, "AdamW", "optimizer 0")
        assert found.runs == 72 - 5 - 1 - LOOKS[0]  # five to wait, one to compare, and half of the pairs
        assert why_not_fused(trainer.optimizers[0]) is None  # its step is torch's own again
        assert trainer.optimizers[0].param_groups[0]["fused"] is None

    def test_it_is_told_everywhere(self, tmp_path: Path) -> None:
        callback = quiet(event_log=str(tmp_path / "events.jsonl"))
        train(callback)
        report = callback.report
        (event,) = decided(report)
        assert (event["kept"], event["value"], event["step"]) == (True, 3.0, 5 + 1 + 2 * LOOKS[0])
        logged = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [e["kind"] for e in logged].count("fused_tried") == 1
        text = " ".join(report.to_text().split())
        assert "torch's fused AdamW saves 2000 ms of each update" in text
        assert "torch's fused AdamW kept: 1000 ms for an update, 3000 ms by the loop, 3.00x faster" in text
        assert "optimizer 0 (AdamW) is not compiled: torch has a fused kernel for it" in text
        assert "torch's fused AdamW kept" in report.to_markdown()
        assert json.loads(report.to_json())["fused"][0]["speedup"]["verdict"] == "faster"
        assert "fused.0.kept,True" in report.to_csv()

    def test_what_it_saves_is_booked(self) -> None:
        callback = quiet()
        train(callback)
        (found,) = callback.report.fused
        assert callback.report.saved_s == pytest.approx(2.0 * found.runs, rel=0.02)
        assert "s saved in all" in callback.report.to_text().replace("\n", " ")

    def test_a_second_fit_begins_anew(self) -> None:
        callback, model = quiet(), seeded(Net)
        _, first = train(callback, model)
        _, second = train(callback, model)
        assert callback.report.fused[0].kept
        assert [why_not_fused(t.optimizers[0]) for t in (first, second)] == [None, None]

    def test_accumulated_gradients_are_compared_by_updates(self) -> None:
        plain = seeded(Net)
        fit(plain, max_epochs=12, accumulate_grad_batches=3)
        callback, model = quiet(), seeded(Net)
        fit(model, [callback], max_epochs=12, accumulate_grad_batches=3)
        assert_same(model, plain, 1e-5)
        assert callback.report.fused[0].kept

    def test_steps_on_trial_are_not_compared(self) -> None:
        callback = quiet()
        train(callback)
        kinds = [(s.phase, s.note) for s in callback.report.samples]
        assert [note for _, note in kinds[6:20]].count("disturbed") == 14
        assert kinds[-1][1] == ""

    def test_checkpoints_do_not_know_of_it(self, tmp_path: Path) -> None:
        callback, model = quiet(), seeded(Net)
        trainer = fit(
            model, [callback], max_epochs=6, enable_checkpointing=True, default_root_dir=str(tmp_path)
        )
        assert callback.report.fused[0].kept
        (path,) = tmp_path.rglob("*.ckpt")
        saved = torch.load(path, weights_only=False)["optimizer_states"][0]
        assert saved["param_groups"][0]["fused"] is None
        assert saved["state"][0]["step"] == trainer.global_step

    def test_an_exception_leaves_torchs_step(self) -> None:
        class Fails(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.global_step == 30:
                    raise ValueError("on purpose")
                return super().training_step(batch, batch_idx)

        callback, model = quiet(), seeded(Fails)
        trainer = make_trainer([callback], max_epochs=6)
        with pytest.raises(ValueError, match="on purpose"):
            trainer.fit(model, loader())
        assert callback.report.fused[0].kept
        assert why_not_fused(trainer.optimizers[0]) is None

    def test_every_optimizer_of_manual_optimization(self) -> None:
        class Two(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.a = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
                self.b = nn.Linear(8, 3)

            def training_step(self, batch: Any, batch_idx: int) -> None:
                first, second = self.optimizers()
                loss = nn.functional.cross_entropy(self.b(self.a(batch[0])), batch[1])
                first.zero_grad()
                second.zero_grad()
                self.manual_backward(loss)
                first.step()
                if batch_idx % 2:
                    second.step()

            def configure_optimizers(self) -> Any:
                return (
                    torch.optim.Adam(self.a.parameters(), lr=0.01),
                    torch.optim.SGD(self.b.parameters(), lr=0.01, momentum=0.9),
                )

        plain, model, callback = seeded(Two), seeded(Two), quiet()
        fit(plain, max_epochs=6)
        fit(model, [callback], max_epochs=6)
        assert_same(model, plain, 1e-5)
        first, second = callback.report.fused
        assert (first.kept, second.kept) == (True, True)
        assert second.runs < first.runs


def test_one_that_is_no_faster_is_left(no_faster: None) -> None:
    plain, callback = seeded(Net), quiet()
    fit(plain, max_epochs=8)
    model = seeded(Net)
    trainer = fit(model, [callback], max_epochs=8)
    assert_same(model, plain, 1e-5)
    (found,) = callback.report.fused
    assert (found.kept, found.reason, found.runs) == (False, "it is not faster", LOOKS[-1])
    assert [e["kept"] for e in decided(callback.report)] == [False]
    assert any("has no use for torch's fused kernel: it is not faster" in n for n in callback.report.notes)
    assert "fused AdamW saves" not in callback.report.to_text()
    assert why_not_fused(trainer.optimizers[0]) is None


@pytest.mark.parametrize(
    "options", [{"fused_optimizer": False}, {"compile_optimizer": False}, {"compile_optimizer": True}]
)
def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    callback = quiet(**options)
    train(callback)
    assert callback.report.fused == ()
    assert not any("fused" in note for note in callback.report.notes)


def test_who_asked_for_something_gets_it() -> None:
    class Asks(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=True)

    callback = quiet()
    train(callback, seeded(Asks))
    assert callback.report.fused == ()


def test_a_nap_waits_for_the_decision(three_times_faster: None) -> None:
    """A declined step is slept through after 32 calm ones; a long threshold must not hide the trial."""
    callback = quiet(threshold=50)
    model = seeded(Net)
    fit(model, [callback], max_epochs=9)
    (event,) = decided(callback.report)
    assert event["step"] == 50 + 1 + 2 * LOOKS[0]


def test_compiled_steps_go_on_with_it(three_times_faster: None) -> None:
    """The plan has no optimizer to compile, and pairs are measured after the trial."""
    plain = seeded(Net)
    fit(plain, max_epochs=12)
    callback = quiet(threshold=3, backend="aot_eager", cost_gate=False, min_speedup=0.0, prewarm=False)
    model = seeded(Net)
    fit(model, [callback], max_epochs=12)
    assert_same(model, plain)
    report = callback.report
    assert [r.kind for r in report.regions] == ["step"]
    assert report.phase == "steady"
    assert report.fused[0].kept
    assert report.speedup is not None


def test_an_optimizer_that_is_seldom_used_does_not_keep_steps_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hotcompile.fused_watch.MOST_STEPS", 20)
    callback = quiet()
    fit(seeded(Net), [callback], max_epochs=8, accumulate_grad_batches=12)
    (found,) = callback.report.fused
    assert (found.kept, found.reason) == (False, "2 updates in 20 steps are too few to tell")
    (event,) = decided(callback.report)
    assert event["step"] == 5 + 20


@pytest.mark.parametrize(
    ("loop_s", "stage", "after"),
    [(1.5, Stage.KEPT, LOOKS[0]), (0.8, Stage.LEFT, LOOKS[0]), (1.01, Stage.LEFT, LOOKS[-1])],
)
def test_when_it_is_decided(
    loop_s: float, stage: Stage, after: int, made_up: Callable[[float], None]
) -> None:
    made_up(loop_s)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    watch = FusedWatch([optimizer], wanted=True, after=2, min_speedup=1.02)
    decided_after = []
    for step in range(100):
        watch.begin_step(step)
        weight.grad = torch.ones(3)
        optimizer.step()
        decided_after += [step for _ in watch.end_step()[1]]
    assert decided_after == [2 + 2 * after]  # two to wait, one to compare
    assert [found.kept for found in watch.report()] == [stage is Stage.KEPT]
    assert not watch.is_busy
    watch.finish()
    assert "step" not in vars(optimizer)


def test_nothing_is_said_to_be_saved_before_it_is_kept(three_times_faster: None) -> None:
    callback = quiet()
    fit(seeded(Net), [callback], max_steps=5 + 1 + LOOKS[0], max_epochs=-1)  # in the middle of the trial
    report = callback.report
    assert (report.fused[0].kept, report.fused[0].speedup, report.saved_s) == (False, None, None)
    assert "torch's fused AdamW on trial" in report.to_text()
    assert report.to_json()
