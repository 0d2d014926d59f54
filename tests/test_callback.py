"""HotCompile on real Trainer runs, with ``aot_eager`` or a backend of the test's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_hotcompile.receipt.metrics import LoggerMetrics
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.tracks import SOON
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Net, Small, fit, loader, make_trainer, seeded

SCOPES: dict[str, dict[str, Any]] = {
    "auto": {},
    "step": {"scope": "step"},
    "step without optimizer": STEP,
    "regions": {"scope": "regions"},
    "regions and optimizer": {"scope": "regions", "compile_optimizer": True},
    "module": {"scope": "module"},
    "pattern": {"scope": "pattern", "targets": ["blocks.*", "head"]},
    "function": {"scope": "pattern", "targets": ["tests.functions:scaled"]},
}


class UsesFunction(Net):
    def __init__(self) -> None:
        super().__init__(n_block=2)

    def loss(self, batch: Any) -> Tensor:
        from tests.functions import scaled

        return scaled(super().loss(batch))


class TestMainJob:
    @pytest.mark.parametrize("name", SCOPES)
    def test_trains_like_eager_and_proves_every_region(self, name: str) -> None:
        plain, model, callback = seeded(UsesFunction), seeded(UsesFunction), hot(**SCOPES[name])
        without = fit(plain, val=loader(16), max_epochs=6)
        trainer = fit(model, [callback], val=loader(16), max_epochs=6)
        assert_same(plain, model)
        for key, value in without.callback_metrics.items():
            torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-4)
        report = callback.report
        assert report.phase == "steady", report.reason
        assert_proven(report)
        assert report.recompiles == 0
        assert report.speedup is not None
        assert report.compile_s > 0
        assert {p.name for p in report.phases} == {"observing", "flipping", "settling", "steady"}

    def test_one_step_compiles_all(self) -> None:
        callback = hot(scope="regions")
        fit(seeded(Small), [callback])
        compiled = [e for e in callback.report.events if e["kind"] == "compiled"]
        flipped = next(e for e in callback.report.events if e["kind"] == "compiling")
        assert [e["step"] for e in compiled] == [flipped["step"] + 1], "told when that step has ended"

    def test_nothing_is_left_behind(self) -> None:
        model = seeded(Small)
        plain = seeded(Small)
        fit(plain)
        fit(model, [callback := hot()])
        assert callback.report.phase == "steady"
        attributes = [{name: set(vars(m)) for name, m in net.named_modules()} for net in (plain, model)]
        assert attributes[0] == attributes[1]

    def test_the_optimizer_is_given_back_with_its_floats(self) -> None:
        before: list[Any] = []

        class Looks(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                before.append(vars(trainer.optimizers[0])["step"])

        callback = hot()
        trainer = fit(seeded(Small), [Looks(), callback])
        optimizer = trainer.optimizers[0]
        assert isinstance(optimizer.param_groups[0]["lr"], float)
        assert vars(optimizer)["step"] is before[0]
        assert any(r.kind == "optimizer" and r.proven for r in callback.report.regions)

    def test_validation_runs_eagerly(self) -> None:
        seen: list[bool] = []

        class Watches(Small):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                before = (
                    callback._runs["train"].session.flip.installation.witness.watch.total_runs
                    if callback._runs
                    else 0
                )
                super().validation_step(batch, batch_idx)
                after = (
                    callback._runs["train"].session.flip.installation.witness.watch.total_runs
                    if callback._runs
                    else 0
                )
                seen.append(before == after)

        callback = hot(scope="regions")
        fit(seeded(Watches), [callback], val=loader(16))
        assert all(seen)
        assert callback.report.phase == "steady"

    @pytest.mark.parametrize("scope", ["auto", "step", "regions"])
    def test_hooks_on_blocks_see_every_call_once(self, scope: str) -> None:
        calls: list[int] = []
        model = seeded(Net, n_block=2)
        model.blocks[1].register_forward_hook(lambda *a: calls.append(1) and None)
        callback = hot(scope=scope)
        trainer = fit(model, [callback])
        assert len(calls) == trainer.global_step
        assert callback.report.phase == "steady"
        assert_proven(callback.report)

    def test_user_counters_in_a_block_count_each_real_call_once(self) -> None:
        class Counts(nn.Linear):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x)

        class Counting(Small):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(
                    nn.Sequential(Counts(16, 16), nn.BatchNorm1d(16)) for _ in range(2)
                )

        plain, model = seeded(Counting), seeded(Counting)
        fit(plain, limit_train_batches=5, max_epochs=1)
        callback = hot(scope="regions")
        fit(model, [callback], limit_train_batches=5, max_epochs=1)
        assert_proven(callback.report)
        assert model.blocks[0][0].calls == plain.blocks[0][0].calls == 5
        assert_same(plain, model)


class TestLogging:
    class Talks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("a", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log_dict({"b": loss * 2, "c": 3.0}, batch_size=8)
            if batch_idx % 2:
                self.log("odd", loss + self.global_step, on_epoch=True)
            value = loss * 1.0
            self.log("before", value)
            value.mul_(0)
            return {"loss": loss, "extra": self.current_epoch}

    def test_all_logged_values_are_those_of_eager_and_no_step_recompiles(self) -> None:
        plain, model, callback = seeded(self.Talks), seeded(self.Talks), hot(**STEP)
        without, trainer = fit(plain), fit(model, [callback])
        assert set(without.callback_metrics) == set(trainer.callback_metrics)
        for key, value in without.callback_metrics.items():
            torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-4)
        graphs = next(r.graphs for r in callback.report.regions if r.kind == "step")
        assert graphs <= 2, callback.report.events  # with and without "odd"
        assert_same(plain, model)

    def test_counters_that_change_each_step_do_not_recompile(self) -> None:
        class Counts(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                weight = 1 + 0.001 * self.global_step + 0.01 * self.current_epoch + 0.1 * batch_idx
                loss = self.loss(batch) * weight
                self.log("loss", loss)
                return loss

        plain, model, callback = seeded(Counts), seeded(Counts), hot(**STEP)
        fit(plain)
        fit(model, [callback])
        assert_proven(callback.report)
        assert callback.report.recompiles == 0, callback.report.events
        assert_same(plain, model)

    def test_metrics_stay_eager(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")

        class Measures(Small):
            def __init__(self) -> None:
                super().__init__()
                self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                logits = self(batch[0])
                loss = F.cross_entropy(logits, batch[1])
                self.accuracy(logits, batch[1])
                self.log("accuracy", self.accuracy, on_epoch=True)
                return loss

        plain, model, callback = seeded(Measures), seeded(Measures), hot(**STEP)
        without, trainer = fit(plain), fit(model, [callback])
        assert callback.report.phase == "steady"
        torch.testing.assert_close(
            trainer.callback_metrics["accuracy_epoch"], without.callback_metrics["accuracy_epoch"]
        )
        assert_same(plain, model)

    def test_an_exception_in_the_step_is_the_users_and_what_was_logged_before_it_is_logged(self) -> None:
        class Fails(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                self.log("seen", loss)
                if self.global_step >= 6:
                    raise ValueError("mine")
                return loss

        model, callback = seeded(Fails), hot(**STEP)
        with pytest.raises(ValueError, match="mine"):
            fit(model, [callback])
        assert "training_step" not in vars(model)
        assert "log" not in vars(model)
        assert callback.report.steps == 6


class TestGate:
    def test_a_short_run_is_declined_with_the_reason(self) -> None:
        callback = hot(cost_gate=True)
        fit(seeded(Small), [callback], max_steps=50, max_epochs=-1)
        report = callback.report
        assert report.phase == "declined"
        assert "steps of" in report.decision
        assert "not worth it" in report.reason
        assert report.regions == ()
        assert report.compile_s == 0

    def test_a_run_too_short_for_anything_is_declined_before_it_is_hot(self) -> None:
        callback = hot(cost_gate=True, threshold=10)
        fit(seeded(Small), [callback], max_epochs=1)
        changed = [e for e in callback.report.events if e.get("phase") == "declined"]
        assert [e["step"] for e in changed] == [SOON]
        assert "loading compiled code alone takes about" in callback.report.reason
        assert callback.report.decision == callback.report.reason
        assert "detected" not in {e["kind"] for e in callback.report.events}

    def test_a_run_of_unknown_length_is_watched_until_it_is_hot(self) -> None:
        class Batches(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(loader())

        callback = hot(cost_gate=True, threshold=20)
        batches = torch.utils.data.DataLoader(Batches(), batch_size=None)
        fit(seeded(Small), [callback], train=batches, max_epochs=1)
        assert (callback.report.steps, callback.report.phase) == (12, "observing")

    @pytest.mark.parametrize("cost_gate", [True, False])
    def test_threshold_zero_compiles_before_the_first_step(self, cost_gate: bool) -> None:
        callback = hot(threshold=0, cost_gate=cost_gate)
        fit(seeded(Small), [callback])
        assert callback.report.phases[0].name == "flipping"
        assert callback.report.phase == "steady"

    def test_what_is_hot_before_a_step_was_measured_waits_for_one(self) -> None:
        callback = hot(threshold=1, cost_gate=True)
        fit(seeded(Small), [callback], max_epochs=1)
        assert callback.report.phase == "declined"
        assert callback.report.reason.startswith("not worth it")

    def test_what_is_not_faster_is_taken_back(self) -> None:
        model, callback = seeded(Small), hot(min_speedup=99.0)
        fit(model, [callback])
        assert callback.report.phase == "reverted"
        assert "min_speedup=99" in callback.report.reason
        assert "training_step" not in vars(model)


class TestFaults:
    @pytest.mark.parametrize("scope", ["step", "regions", "module"])
    def test_a_backend_that_raises_ends_in_eager_with_the_reason(self, scope: str) -> None:
        def broken(graph: Any, inputs: Any, **_: Any) -> Any:
            raise RuntimeError("no code today")

        plain, model = seeded(Small), seeded(Small)
        callback = hot(scope=scope, backend=broken, on_error="eager")
        fit(plain)
        fit(model, [callback])
        assert_same(plain, model, tolerance=0)
        assert callback.report.phase == "reverted"
        assert "no code today" in callback.report.reason
        assert any(e["kind"] == "fallback" for e in callback.report.events)

    def test_a_backend_that_fails_on_the_optimizer_only_leaves_the_rest(self) -> None:
        def picky(graph: Any, inputs: Any, **_: Any) -> Any:
            if sum("foreach" in str(n.target) or "sqrt" in str(n.target) for n in graph.graph.nodes):
                raise RuntimeError("no optimizers")
            return graph.forward

        plain, model, callback = (
            seeded(Small),
            seeded(Small),
            hot(scope="step", backend=picky, on_error="eager"),
        )
        fit(plain)
        fit(model, [callback])
        proven = {r.kind: r.proven for r in callback.report.regions}
        assert proven == {"step": True, "optimizer": False}
        assert callback.report.phase == "steady"
        assert any("no optimizers" in n for n in callback.report.notes)
        assert_same(plain, model)

    def test_fullgraph_that_does_not_hold_ends_in_eager(self) -> None:
        class Breaks(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                torch._dynamo.graph_break()
                return loss

        plain, model = seeded(Breaks), seeded(Breaks)
        callback = hot(scope="step", fullgraph=True, on_error="eager", compile_optimizer=False)
        fit(plain)
        fit(model, [callback])
        assert callback.report.phase == "reverted"
        assert_same(plain, model, tolerance=0)

    def test_on_error_raise_raises(self) -> None:
        def broken(graph: Any, inputs: Any, **_: Any) -> Any:
            raise RuntimeError("no code today")

        with pytest.raises(Exception, match="no code today"):
            fit(seeded(Small), [hot(scope="step", backend=broken, on_error="raise")])

    def test_a_constant_that_changes_each_step_is_contained(self) -> None:
        class Drifts(Small):
            def __init__(self) -> None:
                super().__init__()
                self.name = ""

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.name = self.name + "x"
                return self.loss(batch) * (1 + 0.05 * len(self.name))

            def configure_optimizers(self) -> Any:  # not Adam, which does not care for the loss's scale
                return torch.optim.SGD(self.parameters(), lr=1e-3)

        plain = seeded(Drifts)
        fit(plain, max_epochs=10)
        model, callback = seeded(Drifts), hot(scope="step", compile_optimizer=False, on_error="eager")
        fit(model, [callback], max_epochs=10)
        assert_same(plain, model)
        step = next(r for r in callback.report.regions if r.kind == "step")
        assert step.graphs <= 30, "never one recompile per step"

    def test_an_error_of_our_own_never_stops_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_hotcompile.watch.signature import SignatureReader

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("our own bug")

        monkeypatch.setattr(SignatureReader, "read", fails)
        callback = hot(on_error="eager")
        with pytest.warns(UserWarning, match="our own bug"):
            trainer = fit(seeded(Small), [callback], max_epochs=1)
        assert trainer.global_step == 12
        assert any("our own bug" in n for n in callback.report.notes)

    def test_a_region_that_is_never_called_is_named(self) -> None:
        class HasSpare(Small):
            def __init__(self) -> None:
                super().__init__()
                self.spare = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

        callback = hot(scope="regions")
        fit(seeded(HasSpare), [callback])
        spare = next(r for r in callback.report.regions if r.name == "spare")
        assert not spare.proven
        assert any("spare" in n for n in callback.report.notes)


class TestLifecycle:
    def test_two_fits_with_one_callback(self) -> None:
        callback = hot()
        for _ in range(2):
            model = seeded(Small)
            fit(model, [callback])
            assert callback.report.phase == "steady"
            assert "training_step" not in vars(model)

    @pytest.mark.parametrize("scope", ["step", "regions"])
    def test_copies_of_the_module_in_mid_run_are_eager_and_run_their_own_weights(self, scope: str) -> None:
        copies: list[Net] = []

        class Copies(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                if trainer.global_step == 20:
                    pl_module.trainer = None
                    copies.append(copy.deepcopy(pl_module))
                    copies.append(pickle.loads(pickle.dumps(pl_module)))
                    pl_module.trainer = trainer

        model, callback = seeded(Small), hot(scope=scope, compile_optimizer=False)
        keys: list[list[str]] = []

        class Keys(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                keys.append(list(pl_module.state_dict()))

        fit(model, [callback, Copies(), Keys()])
        assert callback.report.phase == "steady"
        assert all(k == keys[0] for k in keys)
        assert_proven(callback.report)
        assert len(copies) == 2
        x, y = next(iter(loader()))
        runs = [r.runs for r in callback.report.regions]
        for clone in copies:
            assert clone.training_step.__func__ is Net.training_step
            before = clone(x)
            with torch.no_grad():
                clone.head.bias.add_(torch.arange(3.0))
            torch.testing.assert_close(clone(x), before + torch.arange(3.0))
            loss = F.cross_entropy(before + torch.arange(3.0), y)
            torch.testing.assert_close(clone.training_step((x, y), 0), loss)
        assert [r.runs for r in callback.report.regions] == runs

    def test_keyboard_interrupt_gives_the_model_back(self) -> None:
        class Stops(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 10:
                    raise KeyboardInterrupt

        model, callback = seeded(Small), hot()
        with pytest.raises(SystemExit):
            fit(model, [callback, Stops()])
        assert "training_step" not in vars(model)
        assert callback.report.steps == 10

    @pytest.mark.parametrize("owner", [LoggerMetrics, Session], ids=["its receipt", "the model"])
    def test_keyboard_interrupt_at_the_end_loses_neither_the_report_nor_the_model(
        self, owner: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "log_text" if owner is LoggerMetrics else "finish"
        method, calls = getattr(owner, name), []

        def interrupted_once(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
            method(*args)

        monkeypatch.setattr(owner, name, interrupted_once)
        model, callback = seeded(Small), hot(scope="step", compile_optimizer=False)
        with pytest.raises(SystemExit):
            fit(model, [callback], logger=CSVLogger(tmp_path))
        assert calls
        assert "training_step" not in vars(model)
        assert callback.report.steps == 48
        assert_proven(callback.report)

    @pytest.mark.parametrize("scope", ["step", "regions"])
    def test_checkpoints_are_those_of_eager_and_resume_both_ways(self, tmp_path: Path, scope: str) -> None:
        plain = seeded(Small)
        fit(plain, max_epochs=4)
        for first, second in (([hot(scope=scope)], []), ([], [hot(scope=scope)])):
            torch._dynamo.reset()
            model = seeded(Small)
            trainer = fit(model, first, max_epochs=2)
            path = tmp_path / f"{len(first)}.ckpt"
            trainer.save_checkpoint(path)
            saved = torch.load(path, weights_only=False)
            assert list(saved["state_dict"]) == list(plain.state_dict())
            assert isinstance(saved["optimizer_states"][0]["param_groups"][0]["lr"], float)
            resumed = seeded(Small)
            make_trainer(second, max_epochs=4).fit(resumed, loader(), ckpt_path=path)
            (callback,) = [*first, *second]
            assert_proven(callback.report)
            assert_same(plain, resumed)

    def test_the_callback_can_be_copied_and_pickled(self) -> None:
        callback = hot(**STEP)
        fit(seeded(Small), [callback])
        for clone in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert clone.report.phase == callback.report.phase
            assert clone.config == callback.config

    def test_the_verdict_in_a_checkpoint_round_trips(self, tmp_path: Path) -> None:
        callback, trainer = hot(**STEP), None
        empty: dict[str, Any] = {}
        callback.on_save_checkpoint(trainer, None, empty)  # type: ignore[arg-type]
        assert empty == {}
        trainer = fit(seeded(Small), [callback])
        checkpoint: dict[str, Any] = {}
        callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        assert checkpoint["hotcompile"]["phase"] == "steady"
        assert checkpoint["hotcompile"]["final"] is False
        other = hot(**STEP)
        trainer.save_checkpoint(tmp_path / "good.ckpt")
        make_trainer([other], max_epochs=8).fit(seeded(Small), loader(), ckpt_path=tmp_path / "good.ckpt")
        assert other.report.phase == "steady", "only a verdict against it counts"
        assert_proven(other.report)
        saved = torch.load(tmp_path / "good.ckpt", weights_only=False)
        saved["hotcompile"].update(phase="reverted", final=True)
        torch.save(saved, tmp_path / "bad.ckpt")
        other = hot(**STEP)
        make_trainer([other], max_epochs=8).fit(seeded(Small), loader(), ckpt_path=tmp_path / "bad.ckpt")
        assert other.report.phase == "declined"
        assert "before the run was resumed" in other.report.reason

    def test_lightning_does_not_ask_for_the_callback_when_a_checkpoint_is_loaded(
        self, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        trainer = fit(seeded(Small), [hot(**STEP)])
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        make_trainer(max_epochs=5).fit(seeded(Small), loader(), ckpt_path=tmp_path / "a.ckpt")
        assert not [w for w in recwarn if "HotCompile" in str(w.message)]

    def test_a_verdict_of_too_slow_is_remembered_by_a_resumed_run(self, tmp_path: Path) -> None:
        callback = hot(min_speedup=99.0, **STEP)

        class Saves(pl.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

        fit(seeded(Small), [callback, Saves()], max_epochs=4)
        again = hot(min_speedup=99.0, **STEP)
        trainer = make_trainer([again], max_epochs=8)
        trainer.fit(seeded(Small), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert again.report.phase == "declined"
        assert "before" in again.report.reason

    @pytest.mark.parametrize(
        "change",
        [{"min_speedup": 98.0}, {"backend": "eager"}, {"precision": "bf16-mixed"}],
        ids=str,
    )
    def test_it_says_nothing_about_other_options(self, tmp_path: Path, change: dict[str, Any]) -> None:
        trainer = fit(seeded(Small), [hot(min_speedup=99.0, **STEP)])
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        options = {name: value for name, value in change.items() if name == "precision"}
        again = hot(**STEP, **{"min_speedup": 99.0, **{k: v for k, v in change.items() if k not in options}})
        trainer = make_trainer([again], max_epochs=8, **options)
        trainer.fit(seeded(Small), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert again.report.phase == "reverted", again.report.reason

    def test_it_says_nothing_about_another_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = fit(seeded(Small), [hot(min_speedup=99.0, **STEP)])
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        monkeypatch.setattr("lightning_hotcompile.store.hardware._cpu_model", lambda: "another one")
        again = hot(min_speedup=99.0, **STEP)
        make_trainer([again], max_epochs=8).fit(seeded(Small), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert again.report.phase == "reverted", again.report.reason

    def test_what_failed_is_tried_again(self, tmp_path: Path) -> None:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler")

        first = hot(backend=fails, on_error="eager")
        trainer = fit(seeded(Small), [first])
        assert first.report.phase == "reverted"
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        again = hot(backend=fails, on_error="eager")
        make_trainer([again], max_epochs=8).fit(seeded(Small), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert again.report.phase == "reverted", again.report.reason

    def test_the_verdict_is_kept_when_a_finder_loads_a_checkpoint_of_its_own(self, tmp_path: Path) -> None:
        callback = hot(min_speedup=99.0, **STEP)
        trainer = fit(seeded(Small), [callback])
        trainer.save_checkpoint(tmp_path / "last.ckpt")

        class Finds(pl.Callback):
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                trainer.save_checkpoint(tmp_path / "own.ckpt")
                trainer._checkpoint_connector.restore(tmp_path / "own.ckpt")

        again = hot(min_speedup=99.0, **STEP)
        trainer = make_trainer([again, Finds()], max_epochs=8)
        trainer.fit(seeded(Small), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert "before the run was resumed" in again.report.reason

    def test_a_test_of_the_best_checkpoint_is_no_verdict_for_the_next_fit(self, tmp_path: Path) -> None:
        class Tests(Small):
            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.log("test_loss", self.loss(batch))

        fit(seeded(Tests), [hot(min_speedup=99.0, **STEP)]).save_checkpoint(tmp_path / "best.ckpt")
        callback = hot(min_speedup=99.0, **STEP)
        make_trainer([callback]).test(seeded(Tests), loader(), ckpt_path=tmp_path / "best.ckpt")
        fit(seeded(Tests), [callback])
        assert callback.report.phase == "reverted"

    def test_a_checkpoint_is_saved_without_a_report(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Saves(pl.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("lightning_hotcompile.run.stage_run.build_report", no_report)
                    trainer.save_checkpoint(tmp_path / "last.ckpt")

        def no_report(*_: Any) -> None:
            raise AssertionError("a report was made")

        fit(seeded(Small), [hot(**STEP), Saves()])
        kept = torch.load(tmp_path / "last.ckpt", weights_only=False)["hotcompile"]
        assert kept["phase"] == "steady"

    def test_a_fit_inside_of_another_one_leaves_nothing_behind(self) -> None:
        callback, inner = hot(), Small()

        class Probes(Net):
            def on_train_epoch_end(self) -> None:
                if self.current_epoch == 1:
                    make_trainer([callback], max_epochs=1).fit(inner, loader())

        plain, model = Net(n_block=2), Probes(n_block=2)
        fit(plain)
        fit(model, [callback])
        for trained in (model, inner):
            assert set(vars(trained)) == set(vars(plain))
        fit(model, [callback], max_epochs=1)
        assert callback.report.phase in ("settling", "steady")
        assert set(vars(model)) == set(vars(plain))


class TestTrainerOptions:
    @pytest.mark.parametrize("scope", ["step", "regions"])
    @pytest.mark.parametrize(
        "options",
        [
            {"accumulate_grad_batches": 3},
            {"gradient_clip_val": 0.1},
            {"precision": "bf16-mixed"},
            {"precision": "64-true"},
            {"limit_train_batches": 0.5},
        ],
        ids=str,
    )
    def test_trains_like_eager(self, options: dict[str, Any], scope: str) -> None:
        plain, model, callback = seeded(Small), seeded(Small), hot(scope=scope)
        fit(plain, max_epochs=12, **options)
        fit(model, [callback], max_epochs=12, **options)
        assert_same(plain, model, tolerance=2e-2 if options.get("precision") == "bf16-mixed" else 1e-4)
        assert callback.report.phase in ("steady", "settling"), callback.report.reason
        assert callback.report.recompiles == 0

    def test_the_short_last_batch_runs_eagerly(self) -> None:
        ran: list[int] = []

        def counts(graph: Any, inputs: Any, **_: Any) -> Any:
            def run(*args: Any) -> Any:
                ran.extend({len(t) for t in args if isinstance(t, Tensor) and t.dtype is torch.int64})
                return graph(*args)

            return run

        plain, model = seeded(Small), seeded(Small)
        callback = hot(scope="step", backend=counts, compile_optimizer=False)
        fit(plain, train=loader(100))
        fit(model, [callback], train=loader(100))
        assert_same(plain, model)
        assert callback.report.phase == "steady"
        assert_proven(callback.report)
        assert callback.report.recompiles == 0
        assert set(ran) == {8}, "none of 4 rows"

    def test_manual_optimization_takes_regions(self) -> None:
        class Manual(Small):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                optimizer.step()
                self.log("loss", loss)

        plain, model, callback = seeded(Manual), seeded(Manual), hot()
        fit(plain)
        fit(model, [callback])
        assert callback.report.scope == "regions"
        assert callback.report.phase == "steady"
        assert_same(plain, model)

    def test_a_user_that_skips_the_rest_of_an_epoch(self) -> None:
        class Skips(Small):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
                return -1 if batch_idx == 7 else None

        plain, model, callback = seeded(Skips), seeded(Skips), hot()
        fit(plain, val=loader(16))
        fit(model, [callback], val=loader(16))
        assert_proven(callback.report)
        assert_same(plain, model)

    @pytest.mark.parametrize(
        "options", [{"fast_dev_run": True}, {"overfit_batches": 2}, {"barebones": True}], ids=str
    )
    def test_special_modes_train_like_eager(self, options: dict[str, Any]) -> None:
        plain, model = seeded(Small), seeded(Small)
        if "barebones" in options:
            options = {**options, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None}
            options |= {"enable_model_summary": None}
        fit(plain, **options)
        fit(model, [hot()], **options)
        assert_same(plain, model)

    def test_validate_test_and_predict_alone_are_untouched(self) -> None:
        model, callback = seeded(Small), hot()
        trainer = make_trainer([callback])
        trainer.validate(model, loader(), verbose=False)
        trainer.predict(model, [torch.randn(4, 8)])
        assert callback.report.phase == "observing"
        assert callback.report.steps == 0
