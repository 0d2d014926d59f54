"""One fit under the callback: whose time is whose, and what is left of it after an error."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.run.round import Round
from lightning_hotcompile.watch import clock
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.step_record import StepRecord
from tests.hot import hot
from tests.made_up_machine import Ticks
from tests.models import Net, fit, loader, seeded


class SlowLogger(Logger):
    """Takes 100 seconds for what the callback writes.

    Args:
        ticks: the clock.
    """

    name, version = "slow", 0

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.ticks = ticks
        self.writes = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("hotcompile/") for name in metrics):
            self.ticks.now += 100.0
            self.writes += 1

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def test_writes_to_loggers_are_time_of_the_callback_and_of_no_step() -> None:
    ticks, callback = Ticks(), hot(scope="step", compile_optimizer=False)
    logger = SlowLogger(ticks)
    with ticks.in_sessions():
        fit(
            seeded(Net),
            [ticks, callback],
            train=loader(8 * 100),
            max_steps=100,
            logger=logger,
            log_every_n_steps=10,
        )
    report = callback.report
    assert sum(phase.total_s for phase in report.phases) == pytest.approx(100)
    in_mid_run = logger.writes - 1  # and the receipt
    assert in_mid_run > 11
    assert report.overhead_us == pytest.approx(1e6 * in_mid_run)
    assert report.saved_s == pytest.approx(-100 * in_mid_run, abs=1.0)


class LagsBehind:
    """An accelerator that does nothing until somebody waits for it; a step takes it a second."""

    def make_event(self, device_type: str) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.made += 1
                self.order = device.made

            def query(self) -> bool:
                return self.order <= device.passed

            def synchronize(self) -> None:
                device.passed = max(device.passed, self.order)

            def elapsed_time(self, end: Any) -> float:
                return 1e3

        return Event

    made = passed = 0


def test_the_last_steps_are_booked_when_the_accelerator_has_done_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_default_make_event", LagsBehind().make_event)
    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(Net), [callback], train=loader(8 * 12), max_steps=12)
    report = callback.report
    assert report.steps == sum(phase.steps for phase in report.phases) == 12
    assert sum(phase.total_s for phase in report.phases) == pytest.approx(12.0)


class BreaksDown(pl.Callback):
    """An accelerator with an error that each call to it raises, from a step on.

    Args:
        at: batches before that.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.is_broken = False
        self.changed: list[bool] = []

    def make_event(self, device_type: str) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                pass

            def query(self) -> bool:
                if device.is_broken:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return True

            def elapsed_time(self, end: Any) -> float:
                return 1.0

        return Event

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.is_broken = trainer.global_step >= self.at
        self.changed.append("training_step" in vars(module))


@pytest.mark.parametrize(("at", "steps"), [(20, 40), (200, 300)], ids=["at a look", "in a nap"])
def test_an_error_while_steps_are_booked_gives_the_model_back(
    at: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = BreaksDown(at)
    monkeypatch.setattr(clock, "_default_make_event", device.make_event)
    callback, model = hot(scope="step", compile_optimizer=False, on_error="eager"), seeded(Net)
    with pytest.warns(HotCompileWarning, match="illegal memory access") as warned:
        fit(model, [device, callback], train=loader(8 * steps), max_steps=steps)
    assert True in device.changed
    assert "training_step" not in vars(model)
    assert callback.report.phase == "reverted"
    assert callback.report.steps == steps
    assert len([note for note in callback.report.notes if "illegal memory access" in note]) == 1
    assert len([each for each in warned if "illegal memory access" in str(each.message)]) == 1


def test_the_model_is_given_back_where_such_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    device = BreaksDown(at=20)
    monkeypatch.setattr(clock, "_default_make_event", device.make_event)
    model = seeded(Net)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fit(model, [device, hot(scope="step", compile_optimizer=False)], train=loader(8 * 40), max_steps=40)
    assert "training_step" not in vars(model)


def test_a_session_that_has_given_up_stays_so_whatever_fails_meanwhile() -> None:
    class GivesUp(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 20:
                session = callback._runs["train"].session
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(session.side, "finish", lambda: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        session.give_up("nothing works")

    callback, model = hot(scope="step", compile_optimizer=False), seeded(Net)
    fit(model, [GivesUp(), callback], train=loader(8 * 40), max_steps=40)
    assert (callback.report.phase, callback.report.reason) == ("reverted", "nothing works")
    assert callback.report.steps == 40
    assert sum(phase.steps for phase in callback.report.phases) <= 21
    *_, last = (e for e in callback.report.events if e["kind"] == "phase_changed")
    assert (last["phase"], last["reason"]) == ("reverted", "nothing works")


class SlowValidation(Ticks):
    """Each batch of a validation is waited for 30 seconds, and takes one more."""

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now += 30.0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.now += 1.0


@pytest.mark.parametrize("epochs", [3, 30], ids=["looked at", "slept through"])
@pytest.mark.parametrize("stages", [("train",), ("train", "validate")])
def test_other_stages_are_no_time_between_steps(stages: tuple[str, ...], epochs: int) -> None:
    ticks, callback = SlowValidation(), hot(stages=stages, scope="step", compile_optimizer=False)
    with ticks.in_sessions():
        fit(seeded(Net), [ticks, callback], val=loader(16), max_epochs=epochs)
    report = callback.reports["train"]
    assert sum(phase.total_s for phase in report.phases) == pytest.approx(12 * epochs)
    assert report.wait_share == pytest.approx(0.0)
    assert not any("between the steps" in note for note in report.notes)
    if "validate" in stages:  # two batches each, the second one waited for after the first
        assert callback.reports["validate"].wait_share == pytest.approx(30 / 32)


def test_they_count_where_time_is_what_limits_a_training() -> None:
    ledger = Ledger()
    for i in range(10):
        away = 50.0 if i in (4, 8) else 0.0
        record = StepRecord(phase="observing", compiled=False)
        ledger.add(StepTime(tag=record, seconds=1.0, wait_seconds=0.1, away_seconds=away), record)
    assert ledger.wait_s == pytest.approx((10 * 0.1 + 50.0) / 10)
    assert ledger.wait_share == pytest.approx(1 / 11)


def test_a_later_plan_knows_what_a_schedule_has_moved_since_training_began() -> None:
    class Cycles(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class BeginsAnother(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 20:
                session = callback._runs["train"].session
                installation = Round(session.rounds._context, session.plan).flip.installation
                installation.put()
                reasons.extend(optimizer.error for optimizer in installation.optimizers)
                installation.take_out()

    reasons: list[str | None] = []
    callback = hot(scope="step", threshold=1000)
    fit(seeded(Cycles), [callback, BeginsAnother()], max_steps=24, max_epochs=-1)
    assert reasons == ["its betas changed since training began (a schedule?)"]
