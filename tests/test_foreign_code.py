"""What other people's code does around a Trainer, and has to keep doing with the callback in it.

Found by adding the callback, through Lightning's entry point, to every Trainer of a large body of code
that was not written for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BatchSizeFinder
from torch._dynamo.variables.tensor import TensorVariable

from lightning_hotcompile import HotCompile
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Net, Small, fit, loader, make_trainer, seeded


class Counting:
    """A callable that counts its calls, as an instrument around somebody's method does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


class TestOneListForSeveralTrainers:
    """Lightning appends to the list that it is given, so the next Trainer finds our callback in it."""

    @pytest.fixture(autouse=True)
    def _switched_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "force")
        monkeypatch.setenv("HOTCOMPILE_THRESHOLD", "1000")

    def test_a_second_trainer_can_be_built(self) -> None:
        callbacks: list[Any] = [pl.Callback()]
        for _ in range(3):
            assert make_trainer(callbacks).callbacks  # type: ignore[attr-defined]

    def test_the_second_trainer_is_watched_by_one_callback(self) -> None:
        callbacks: list[Any] = [pl.Callback()]
        for _ in range(2):
            trainer = make_trainer(callbacks, max_epochs=1)
            trainer.fit(seeded(Small), loader())
        found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        phases = [c.report.phase for c in found if isinstance(c, HotCompile)]
        assert sorted(phases) == ["declined", "observing"]


class WrapsItsOptimizer(Small):
    """Counts the steps of its optimizer by a wrapper on the instance."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        self.counting = Counting(optimizer.step)
        vars(optimizer)["step"] = self.counting
        return optimizer


class TestOptimizerWrappedByTheUser:
    def test_a_wrapper_on_the_instance_still_runs_at_each_step(self) -> None:
        plain, model = seeded(WrapsItsOptimizer), seeded(WrapsItsOptimizer)
        callback = hot(scope="step")
        fit(plain)
        fit(model, [callback])
        assert_proven(callback.report)
        assert_same(plain, model)
        assert model.counting.calls == plain.counting.calls == 48
        assert any("its step was wrapped or replaced" in note for note in callback.report.notes)

    def test_a_wrapper_on_the_class_still_runs_at_each_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        original = torch.optim.SGD.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.optim.SGD, "step", step)

        class WithSGD(Small):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.05)

        fit(seeded(WithSGD), [hot(scope="step")])
        assert len(calls) == 48

    @pytest.mark.parametrize("what", ["step", "training_step"])
    def test_what_was_put_around_ours_in_mid_run_is_still_there_afterwards(self, what: str) -> None:
        placed: list[tuple[Any, Counting]] = []

        class Instruments(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                if trainer.global_step == 20:
                    owner = trainer.optimizers[0] if what == "step" else pl_module
                    placed.append((owner, Counting(getattr(owner, what))))
                    vars(owner)[what] = placed[0][1]

        callback = hot(scope="step", compile_optimizer=what == "step")
        fit(seeded(Small), [callback, Instruments()])
        assert callback.report.phase == "steady"
        ((owner, counting),) = placed
        assert counting.calls == 28
        assert vars(owner).get(what) is counting


class CountsResets(Small):
    """Counts how often its metric is reset, and looks at the count within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.mean.reset = Counting(self.mean.reset)  # type: ignore[method-assign]
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.seen.append(self.mean.reset.calls)  # type: ignore[attr-defined]
        self.log("mean", self.mean)
        return loss


class ReadsItsLogs(Small):
    """Reads back within the step what it has just logged."""

    def __init__(self) -> None:
        super().__init__()
        self.differences: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.differences.append(float(self.trainer.callback_metrics["loss"]) - float(loss.detach()))
        return loss


class TestInsideOfTheStep:
    def test_attributes_of_a_callable_on_a_metric_are_its_own(self) -> None:
        plain, model = seeded(CountsResets), seeded(CountsResets)
        callback = hot(**STEP)
        fit(plain)
        fit(model, [callback])
        assert_proven(callback.report)
        assert_same(plain, model)
        assert model.seen == plain.seen

    def test_what_was_logged_can_be_read_back_at_once(self) -> None:
        model, callback = seeded(ReadsItsLogs), hot()
        fit(model, [callback])
        assert_proven(callback.report)
        assert model.differences == [0.0] * 48


MADE: list[int] = []


@functools.cache
def random_offset(width: int) -> torch.Tensor:
    """Drawn once, and the same in each step from then on."""
    MADE.append(width)
    return torch.randn(width)


class DrawsOnce(Small):
    """Adds what a function with a cache has drawn in the first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x + random_offset(8)), y)


class DrawsOnceItself(Small):
    """The same with the cache on a method."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def offset(self, width: int) -> torch.Tensor:
        MADE.append(width)
        return torch.randn(width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x + self.offset(8)), y)


class TestFunctionsWithACache:
    @pytest.mark.parametrize("kind", [DrawsOnce, DrawsOnceItself])
    def test_what_was_made_once_stays(self, kind: type[Net]) -> None:
        results, states = [], []
        callback = hot(**STEP)
        for callbacks in ([], [callback]):
            random_offset.cache_clear()
            MADE.clear()
            model = seeded(kind)
            fit(model, callbacks)
            results.append(model)
            states.append((len(MADE), torch.get_rng_state().tolist()))
        assert_proven(callback.report)
        assert_same(*results)
        assert states[0] == states[1]


class AsksTheClock(Small):
    """Calls what Dynamo cannot trace, and reads a number back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.since = time.perf_counter()
        loss = self.loss(batch)
        self.last = loss.item()
        return loss


class TestConsole:
    def test_the_compiler_warns_of_nothing(
        self, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
    ) -> None:
        TensorVariable._warn_capture_scalar_outputs.cache_clear()  # said once a process
        torch._dynamo.reset()
        callback = hot(scope="step", on_error="eager")
        fit(seeded(AsksTheClock), [callback])
        assert callback.report.graph_breaks
        told = [w.filename for w in recwarn if "_dynamo" in w.filename]
        told += [r.getMessage() for r in caplog.records if r.name.startswith("torch._dynamo")]
        assert told == []


class TestBatchSizeFinder:
    class Sized(Small):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return loader(96, self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(16, self.batch_size)

    @pytest.mark.parametrize("scope", ["auto", "regions"])
    def test_as_a_callback_it_finds_the_same_size_and_the_fit_is_the_same(
        self, scope: str, tmp_path: Any
    ) -> None:
        models = []
        for callbacks in ([], [hot(scope=scope)]):
            model = seeded(self.Sized)
            finder = BatchSizeFinder(max_trials=2, steps_per_trial=4)
            torch.manual_seed(1)
            make_trainer([finder, *callbacks], default_root_dir=tmp_path, max_epochs=3).fit(model)
            models.append(model)
        assert models[0].batch_size == models[1].batch_size > 2
        assert_same(*models)
        (callback,) = callbacks
        assert callback.report.phase in ("settling", "steady"), callback.report.reason


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_one_process_can_train_as_often_as_it_likes(scope: str) -> None:
    """Dynamo counts what it compiles for a code object, and has enough after 256 times in one process."""
    with torch._dynamo.config.patch(accumulated_recompile_limit=3):
        for _ in range(5):
            callback = hot(scope=scope, compile_optimizer=scope == "step")
            fit(seeded(Small), [callback], max_steps=8, max_epochs=-1)
            assert_proven(callback.report)
