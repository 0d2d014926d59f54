"""A training whose optimizer has a fused kernel uses it where it is faster, and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_hotcompile import HotCompile
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.plan.optimizers import has_kernel, why_not_fused
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.report import FusedOptimizer, Report
from lightning_hotcompile.run.fused_memory import LASTS, FusedMemory, digest_of
from lightning_hotcompile.run.fused_trials import MOST_IDLE
from lightning_hotcompile.run.fused_watch import LOOKS, STEPS_AFTER, FusedWatch
from lightning_hotcompile.store.store import Store
from lightning_hotcompile.swap.optimizers.fused_step import FusedStep, Stage
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.stats import Ratio
from lightning_hotcompile.watch.step_record import StepRecord
from tests.hot import assert_same
from tests.models import Net, fit, loader, make_trainer, seeded

Timed = Callable[[bool, float, bool], None]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets an update take 1 s by the kernel, and as much as is asked for by the loop."""

    def make(loop_s: float) -> None:
        def step(optimizer: torch.optim.Optimizer, timed: Timed, **options: Any) -> FusedStep:
            def told(by_kernel: bool, seconds: float, disturbed: bool) -> None:
                timed(by_kernel, 1.0 if by_kernel else loop_s, disturbed)

            return FusedStep(optimizer, told, **options)

        monkeypatch.setattr("lightning_hotcompile.run.fused_watch.FusedStep", step)

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


def entered(report: Report) -> dict[str, int]:
    """At which step each phase began."""
    return {e["phase"]: e["step"] for e in report.events if e["kind"] == "phase_changed"}


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

    @pytest.mark.parametrize("entry", [np.ones(2), torch.ones(2)], ids=["array", "tensor"])
    def test_a_group_may_hold_an_entry_of_the_users(self, entry: Any, tmp_path: Path) -> None:
        class Scaled(Net):
            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW([{"params": list(self.parameters()), "layer_scale": entry}])

        callback = quiet(store=str(tmp_path))
        _, trainer = train(callback, seeded(Scaled))
        assert [found.kept for found in callback.report.fused] == [True]
        assert trainer.optimizers[0].param_groups[0]["layer_scale"] is entry

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
    reason = "faster: 1.01x [1.01, 1.01], below min_speedup=1.02"
    assert (found.kept, found.reason, found.runs) == (False, reason, LOOKS[-1])
    assert [e["kept"] for e in decided(callback.report)] == [False]
    assert any(f"has no use for torch's fused kernel: {reason}" in n for n in callback.report.notes)
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
    note = "torch's fused kernel was not tried for optimizer 0 (AdamW): foreach=True was asked for"
    assert note in callback.report.notes


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
    assert report.speedup.n == 10


def test_an_optimizer_that_is_seldom_used_does_not_keep_steps_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hotcompile.run.fused_watch.MOST_STEPS", 20)
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
    watch = FusedWatch([optimizer], wanted=True, after=2, min_speedup=1.02, memory=FusedMemory(None))
    decided_after = []
    for step in range(100):
        watch.begin_step(step, lambda: True)
        weight.grad = torch.ones(3)
        optimizer.step()
        decided_after += [step for _ in watch.end_step()[1]]
    assert decided_after == [2 + 2 * after]  # two to wait, one to compare
    assert [found.kept for found in watch.report()] == [stage is Stage.KEPT]
    assert not watch.is_busy
    watch.finish()
    assert "step" not in vars(optimizer)


def test_a_late_update_may_have_hooks_of_others(made_up: Callable[[float], None]) -> None:
    made_up(3.0)
    weight, calls = nn.Parameter(torch.ones(3)), list[int]()
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    watch = FusedWatch([optimizer], wanted=True, after=2, min_speedup=1.02, memory=FusedMemory(None))
    for step in range(100):
        watch.begin_step(step, lambda: True)
        if step == 3 * MOST_IDLE:
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        if step >= 4 * MOST_IDLE:
            weight.grad = torch.ones(3)
            optimizer.step()
        watch.end_step()
    assert len(calls) == 100 - 4 * MOST_IDLE
    assert [found.kept for found in watch.report()] == [True]
    watch.finish()
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_nothing_is_said_to_be_saved_before_it_is_kept(three_times_faster: None) -> None:
    callback = quiet()
    fit(seeded(Net), [callback], max_steps=5 + 1 + LOOKS[0], max_epochs=-1)  # in the middle of the trial
    report = callback.report
    assert (report.fused[0].kept, report.fused[0].speedup, report.saved_s) == (False, None, None)
    assert "torch's fused AdamW on trial" in report.to_text()
    assert report.to_json()


class TestNothingElseMeanwhile:
    """An update on trial and a step on trial would disturb each other."""

    def test_a_plan_waits_for_the_trial(
        self, three_times_faster: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pays = Decision(go=True, reason="it pays")
        monkeypatch.setattr("lightning_hotcompile.run.weighing.Weighing.forecast", lambda *_: pays)
        callback = quiet(threshold=3, backend="aot_eager", prewarm=False)
        fit(seeded(Net), [callback], max_epochs=12)
        (event,) = decided(callback.report)
        assert event["step"] == 3 + 1 + 2 * LOOKS[0]
        assert entered(callback.report)["flipping"] == event["step"] + STEPS_AFTER

    @pytest.mark.parametrize("threshold", [0, 3])
    def test_a_trial_waits_for_the_plan(self, three_times_faster: None, threshold: int) -> None:
        """Where the plan comes first: it was asked for, or an earlier run knows it."""
        callback = quiet(
            threshold=threshold, backend="aot_eager", cost_gate=False, min_speedup=0.0, prewarm=False
        )
        fit(seeded(Net), [callback], max_epochs=12)
        report = callback.report
        (event,) = decided(report)
        assert entered(report)["flipping"] == threshold
        assert event["step"] == entered(report)["steady"] + 1 + 1 + 2 * LOOKS[0]  # from the next step on
        assert report.fused[0].kept

    def test_a_run_too_short_for_a_compile_is_told_so_at_once(self, three_times_faster: None) -> None:
        callback = quiet(threshold=5)
        fit(seeded(Net), [callback], max_steps=12, max_epochs=-1)
        assert callback.report.phase == "declined"


def test_optimizers_that_are_decided_one_after_the_other() -> None:
    """Between the two decisions no step is a measure; what was known before still counts."""
    ledger = Ledger()
    record = StepRecord(phase="observing", compiled=False)
    ledger.add(StepTime(seconds=2.0, wait_seconds=0.0, tag=record), record)
    ledger.forget_eager_steps()
    ledger.forget_eager_steps()
    assert ledger.eager_step_s == 2.0


def test_a_step_without_a_loss(three_times_faster: None) -> None:
    """Lightning calls the optimizer all the same, which has no gradients then."""

    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if self.trainer.current_epoch == 2 else super().training_step(batch, batch_idx)

    plain, model, callback = seeded(Skips), seeded(Skips), quiet(threshold=3)
    fit(plain, max_epochs=6)
    fit(model, [callback], max_epochs=6)
    assert_same(model, plain, 1e-5)
    assert callback.report.fused[0].kept


def test_an_optimizer_that_somebody_wraps_is_told_of(three_times_faster: None) -> None:
    class Wraps(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            if "step" not in vars(optimizer) or not hasattr(optimizer.step, "counted"):
                inner = optimizer.step

                def step(*args: Any, **kwargs: Any) -> Any:
                    return inner(*args, **kwargs)

                step.counted = True  # type: ignore[attr-defined]
                optimizer.step = step  # type: ignore[method-assign]

    callback = quiet()
    fit(seeded(Net), [Wraps(), callback], max_epochs=6)
    assert callback.report.fused == ()
    assert any(
        "was not tried for optimizer 0 (AdamW): its step was wrapped" in n for n in callback.report.notes
    )


def test_an_error_at_the_end_gives_the_step_back(
    three_times_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("at the end")

    monkeypatch.setattr("lightning_hotcompile.run.rounds.Rounds.close", fails)
    callback = quiet(on_error="eager")
    with pytest.warns(UserWarning, match="at the end"):
        trainer = fit(seeded(Net), [callback], max_epochs=6)
    assert why_not_fused(trainer.optimizers[0]) is None


class TestWhatIsDeclinedFromTheStart:
    """A kernel needs no compiler: it is tried where nothing is compiled as well."""

    def test_a_plan_that_was_too_slow_before_the_run_was_resumed(
        self, three_times_faster: None, tmp_path: Path
    ) -> None:
        slow: dict[str, Any] = {
            "cost_gate": False,
            "min_speedup": 1.9,
            "backend": "aot_eager",
            "prewarm": False,
        }

        class Saves(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

        first, again = quiet(**slow), quiet(**slow, event_log=str(tmp_path / "events.jsonl"))
        fit(seeded(Net), [first, Saves()], max_epochs=8)
        assert first.report.phase == "reverted"
        trainer = make_trainer([again], max_epochs=14)
        trainer.fit(seeded(Net), loader(), ckpt_path=tmp_path / "last.ckpt")
        report = again.report
        assert (report.phase, report.reason.startswith("before the run was resumed")) == ("declined", True)
        assert (report.fused[0].kept, report.steps, report.regions) == (True, 72, ())
        assert next(e["kind"] for e in report.events) == "declined"
        assert (tmp_path / "events.jsonl").read_text(encoding="utf-8").count('"declined"') == 1

    def test_a_model_in_which_nothing_can_be_compiled(self, three_times_faster: None) -> None:
        plain, model = seeded(Net), seeded(Net)
        callback = quiet(scope="regions", keep_eager=["*"])
        fit(plain, max_epochs=6)
        fit(model, [callback], max_epochs=6)
        assert_same(model, plain, 1e-5)
        report = callback.report
        assert report.phase == "declined"
        assert "nothing to compile in Net" in report.reason
        assert report.fused[0].kept
        assert "nothing to compile" in report.to_text()


class TestWhatAnEarlierRunHasFound:
    def test_a_kernel_that_was_faster_is_used_after_one_comparison(
        self, three_times_faster: None, tmp_path: Path
    ) -> None:
        first, second = (quiet(store=str(tmp_path)) for _ in range(2))
        train(first)
        plain = seeded(Net)
        fit(plain, max_epochs=6)
        model, trainer = train(second)
        assert_same(model, plain, 1e-5)
        (found,) = second.report.fused
        assert found.runs == 72 - 2  # one to make the state, one to compare
        assert found.timed_before is not None
        assert (found.loop_ms, found.fused_ms) == (3000.0, 1000.0)
        assert found.speedup == first.report.fused[0].speedup
        assert second.report.saved_s == pytest.approx(2.0 * found.runs, rel=0.02)
        (event,) = decided(second.report)
        assert (event["kept"], event["value"], event["step"]) == (True, 3.0, 2)
        assert event["timed_before"] == found.timed_before
        text = " ".join(second.report.to_text().split())
        assert f"an earlier run has timed it ({found.timed_before})" in text
        assert why_not_fused(trainer.optimizers[0]) is None

    def test_one_that_was_not_is_not_tried(self, no_faster: None, tmp_path: Path) -> None:
        first, second = (quiet(store=str(tmp_path)) for _ in range(2))
        fit(seeded(Net), [first], max_epochs=8)
        assert not first.report.fused[0].kept
        train(second)
        assert second.report.fused == ()
        assert decided(second.report) == []
        found = "an earlier run has timed it, faster: 1.01x [1.01, 1.01], below min_speedup=1.02"
        assert f"torch's fused kernel was not tried for optimizer 0 (AdamW): {found}" in second.report.notes

    def test_one_that_was_not_is_used_by_who_wants_less(self, no_faster: None, tmp_path: Path) -> None:
        fit(seeded(Net), [quiet(store=str(tmp_path))], max_epochs=8)
        callback = quiet(store=str(tmp_path), min_speedup=1.005)
        train(callback)
        assert callback.report.fused[0].kept

    def test_a_trial_that_did_not_end_says_nothing(self, no_faster: None, tmp_path: Path) -> None:
        """After the first look there is a ratio, and no verdict."""
        first, second = (quiet(store=str(tmp_path)) for _ in range(2))
        fit(seeded(Net), [first], max_steps=5 + 1 + 2 * LOOKS[0] + 4, max_epochs=-1)
        assert first.report.fused[0].speedup is not None
        train(second)
        assert [found.timed_before for found in second.report.fused] == [None]

    def test_a_trial_that_was_given_up_says_nothing(
        self, no_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither does one that came to its last step between two looks."""
        monkeypatch.setattr("lightning_hotcompile.run.fused_watch.MOST_STEPS", 1 + 2 * LOOKS[0] + 4)
        first, second = (quiet(store=str(tmp_path)) for _ in range(2))
        train(first)
        (found,) = first.report.fused
        assert found.speedup is not None
        assert "too few to tell" in found.reason
        train(second)
        assert [each.timed_before for each in second.report.fused] == [None]

    def test_a_kernel_that_differs_now_is_left(
        self, three_times_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(quiet(store=str(tmp_path)))
        monkeypatch.setattr(
            "lightning_hotcompile.swap.optimizers.fused_check.FusedCheck.agrees", lambda _: False
        )
        callback = quiet(store=str(tmp_path))
        train(callback)
        (found,) = callback.report.fused
        assert (found.kept, found.reason) == (False, "its update differs from that of the loop")

    def test_a_plan_is_decided_as_usual_beside_it(
        self, three_times_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a step takes with the kernel is known when the step is hot."""
        seen: list[float | None] = []

        def forecast(weighing: Any, track: Any) -> Decision:
            seen.append(weighing._ledger.eager_step_s)
            return Decision(go=True, reason="it pays")

        train(quiet(store=str(tmp_path), threshold=2))
        monkeypatch.setattr("lightning_hotcompile.run.weighing.Weighing.forecast", forecast)
        callback = quiet(store=str(tmp_path), threshold=2, backend="aot_eager", prewarm=False)
        train(callback)
        assert seen
        assert None not in seen
        (event,) = decided(callback.report)
        assert event["timed_before"] is not None
        assert entered(callback.report)["flipping"] == event["step"] + STEPS_AFTER

    @pytest.mark.parametrize(
        ("later", "known"), [(LASTS * 0.9, True), (LASTS * 1.1, False), (-LASTS * 1.1, False)]
    )
    def test_it_lasts_for_a_week(self, tmp_path: Path, later: timedelta, known: bool) -> None:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
        store = Store(tmp_path)
        FusedMemory(store).learn(optimizer, timed())
        now = datetime.now(timezone.utc) + later
        found = FusedMemory(store, now=lambda: now.isoformat()).of(optimizer, 0.98)
        assert (found is not None) is known

    def test_without_a_store_nothing_is_known(self) -> None:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
        FusedMemory(None).learn(optimizer, timed())
        assert FusedMemory(None).of(optimizer, 0.98) is None

    def test_only_an_optimizer_like_it(self) -> None:
        def digest(size: int = 3, **settings: Any) -> str:
            return digest_of(torch.optim.AdamW([nn.Parameter(torch.ones(size))], **settings))

        usual = digest()
        assert digest(lr=0.3) == usual
        others = [digest(4), digest(amsgrad=True), digest(weight_decay=0.0), digest(maximize=True)]
        adam = digest_of(torch.optim.Adam([nn.Parameter(torch.ones(3))], weight_decay=0.1))
        assert len({usual, adam, *others}) == 6

    def test_parameters_may_have_no_shape_yet(self) -> None:
        def digest(*shape: int) -> str:
            known = nn.Parameter(torch.ones(*shape))
            return digest_of(torch.optim.AdamW([known, *nn.LazyLinear(3).parameters()]))

        assert digest(3) == digest(3) != digest(4)

    @pytest.mark.parametrize("entry", [np.ones(2), torch.ones(2), "outer", None], ids=repr)
    def test_an_entry_of_the_users_in_a_group_is_none_of_its_settings(self, entry: Any) -> None:
        groups = [{"params": [nn.Parameter(torch.ones(3))]}]
        usual = digest_of(torch.optim.AdamW(groups))
        assert digest_of(torch.optim.AdamW([{**groups[0], "layer_scale": entry}])) == usual


def timed() -> FusedOptimizer:
    ratio = Ratio(value=2.0, low=1.5, high=2.5, n=8, confidence=0.98)
    return FusedOptimizer(
        name="optimizer 0",
        class_name="AdamW",
        kept=True,
        reason="",
        loop_ms=1.0,
        fused_ms=0.5,
        speedup=ratio,
        runs=3,
    )


class Late(Net):
    """A second optimizer that makes no step before the fiftieth batch, if ever."""

    begins = 50

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        if self.trainer.current_epoch * 12 + batch_idx >= self.begins:
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        head = list(self.head.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("head")]
        return [torch.optim.AdamW(others), torch.optim.AdamW(head)]


class Never(Late):
    """The second optimizer makes no step at all."""

    begins = 10_000


@pytest.mark.usefixtures("three_times_faster")
class TestAnOptimizerThatMakesNoUpdate:
    def test_it_does_not_keep_the_training_from_being_compiled(self) -> None:
        callback = quiet(cost_gate=False, backend="aot_eager", min_speedup=0.0, prewarm=False)
        train(callback, seeded(Never))
        assert entered(callback.report)["flipping"] < 2 * MOST_IDLE + 10
        assert [found.name for found in callback.report.fused] == ["optimizer 0"]
        assert "not tried for optimizer 1 (AdamW): it made no update" in callback.report.to_text().replace(
            "\n", " "
        )

    def test_one_over_the_weights_of_the_other_keeps_nothing_waiting_either(self) -> None:
        class Shared(Never):
            def configure_optimizers(self) -> Any:
                return [torch.optim.AdamW(self.parameters()), torch.optim.AdamW(self.parameters())]

        callback = quiet(cost_gate=False, backend="aot_eager", min_speedup=0.0, prewarm=False)
        train(callback, seeded(Shared))
        assert entered(callback.report)["flipping"] < 2 * MOST_IDLE + 10

    def test_one_that_makes_an_update_now_and_then_is_tried_in_the_end(self) -> None:
        class Rarely(Late):
            seen = 0

            def training_step(self, batch: Any, batch_idx: int) -> None:
                self.seen += 1
                self.begins = 0 if self.seen % 20 == 0 else 10_000
                super().training_step(batch, batch_idx)

        plain, model, callback = seeded(Rarely), seeded(Rarely), quiet()
        fit(plain, max_epochs=40)
        fit(model, [callback], max_epochs=40)
        assert_same(model, plain, 1e-5)
        assert [found.kept for found in callback.report.fused] == [True, True]
        assert not any(o._optimizer_step_post_hooks for o in model.trainer.optimizers)

    def test_it_is_tried_once_it_makes_one(self) -> None:
        plain, callback = seeded(Late), quiet()
        fit(plain, max_epochs=10)
        model = seeded(Late)
        fit(model, [callback], max_epochs=10)
        assert_same(model, plain, 1e-5)
        assert [found.kept for found in callback.report.fused] == [True, True]
        assert 0 < callback.report.fused[1].runs < callback.report.fused[0].runs


@pytest.mark.usefixtures("three_times_faster")
class TestOptimizersThatAreReplaced:
    def test_the_new_one_is_tried_anew_and_the_old_one_let_go(self) -> None:
        old = list[torch.optim.Optimizer]()

        class Replaces(pl.Callback):
            def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                if trainer.current_epoch == 3:
                    old.append(trainer.optimizers[0])
                    trainer.strategy.setup_optimizers(trainer)

        class Looks(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                if old:
                    seen.append(has_kernel(trainer.optimizers[0]))

        seen, plain, model, callback = list[bool](), seeded(Net), seeded(Net), quiet()
        fit(plain, [Replaces()], max_epochs=8)
        old.clear()
        fit(model, [callback, Replaces(), Looks()], max_epochs=8)
        assert_same(model, plain, 1e-5)
        assert any(seen)
        assert not has_kernel(old[0])
        assert [found.kept for found in callback.report.fused] == [True, True]
        assert all(0 < found.runs < 5 * 12 for found in callback.report.fused)
