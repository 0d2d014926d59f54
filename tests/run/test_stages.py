"""Validation, testing and prediction compiled on their own, each with a report of its own."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_hotcompile.run.stages import remaining_batches
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, Small, fit, loader, make_trainer, seeded


class Evaluates(Small):
    """Logs in each stage, and predicts."""

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)


SCOPES = ("step", "regions")


@pytest.mark.parametrize("scope", SCOPES)
def test_validation_inside_a_fit_has_its_own_detector_and_report(scope: str) -> None:
    plain, model = seeded(Evaluates), seeded(Evaluates)
    callback = hot(scope=scope, stages=("train", "validate"), compile_optimizer=False)
    without = fit(plain, val=loader(48, seed=3), max_epochs=6)
    trainer = fit(model, [callback], val=loader(48, seed=3), max_epochs=6)
    assert_same(plain, model)
    for key, value in without.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-4)
    assert set(callback.reports) == {"train", "validate"}
    for stage, report in callback.reports.items():
        assert report.phase in ("steady", "settling"), f"{stage}: {report.reason}"
        assert_proven(report)
        assert report.recompiles == 0
        assert {e["stage"] for e in report.events} == {stage}
    assert callback.reports["validate"].steps == 36, "the sanity check is not watched"
    assert callback.report.phase == callback.reports["train"].phase
    if scope == "step":
        assert [r.name for r in callback.reports["validate"].regions] == ["validation_step"]
    assert not {"training_step", "validation_step", "log"} & set(vars(model))
    assert all("_compiled_call_impl" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("scope", SCOPES)
def test_training_stays_compiled_after_each_validation(scope: str) -> None:
    callback = hot(scope=scope, stages=("train", "validate"), compile_optimizer=False)
    fit(seeded(Evaluates), [callback], val=loader(48), max_epochs=8)
    train = callback.reports["train"]
    flipping = next(e["step"] for e in train.events if e["kind"] == "compiling")
    runs = min(r.runs for r in train.regions)
    assert runs > (train.steps - flipping) // 2, "half of the settling steps run eagerly, no others"


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_alone_is_compiled_if_asked_for(stage: str) -> None:
    plain, model, callback = seeded(Evaluates), seeded(Evaluates), hot(stages=(stage,), scope="step")
    expected = getattr(make_trainer(), stage)(plain, loader(), verbose=False)
    found = getattr(make_trainer([callback]), stage)(model, loader(), verbose=False)
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, abs=1e-4)
    assert callback.report.steps == 12
    assert_proven(callback.report)
    assert list(callback.reports) == [stage]


def test_predictions_are_those_of_eager() -> None:
    plain, model, callback = seeded(Evaluates), seeded(Evaluates), hot(stages=("predict",), scope="step")
    expected = make_trainer().predict(plain, loader())
    found = make_trainer([callback]).predict(model, loader())
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert callback.report.regions[0].proven


def test_inference_mode_off_is_another_grad_mode_and_works_too() -> None:
    plain, model, callback = seeded(Evaluates), seeded(Evaluates), hot(stages=("test",), scope="regions")
    (expected,) = make_trainer(inference_mode=False).test(plain, loader(), verbose=False)
    (found,) = make_trainer([callback], inference_mode=False).test(model, loader(), verbose=False)
    assert found == pytest.approx(expected, abs=1e-4)
    assert_proven(callback.report)


def test_several_dataloaders_are_signatures_of_their_own() -> None:
    class Two(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("v", self.loss(batch) * (1 + dataloader_idx))

    plain, model, callback = seeded(Two), seeded(Two), hot(stages=("validate",), scope="step")
    loaders = [loader(40), loader(40, seed=1)]
    expected = make_trainer().validate(plain, loaders, verbose=False)
    found = make_trainer([callback]).validate(model, loaders, verbose=False)
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert callback.report.phase in ("settling", "steady", "flipping")
    detected = [e for e in callback.report.events if e["kind"] == "detected"]
    assert len({e["signature"] for e in detected}) == len(detected) == 2


def test_stages_without_training_leave_training_alone() -> None:
    plain, model, callback = seeded(Evaluates), seeded(Evaluates), hot(stages=("validate",))
    fit(plain, val=loader(48))
    fit(model, [callback], val=loader(48))
    assert_same(plain, model, tolerance=0)
    assert list(callback.reports) == ["validate"]


def test_a_stage_that_is_not_asked_for_is_not_watched() -> None:
    callback = hot()
    make_trainer([callback]).test(seeded(Evaluates), loader(), verbose=False)
    assert callback.reports == {}
    assert callback.report.steps == 0


def test_compiling_is_counted_where_it_was_done() -> None:
    """Dynamo tells of each compile in the process: the other stage's, and what the model compiles itself."""

    def slow(graph: Any, inputs: Any) -> Any:
        time.sleep(0.5)
        return graph

    class CompilesToo(Evaluates):
        def on_validation_epoch_end(self) -> None:
            torch.compile(lambda x: x + self.current_epoch, backend=slow)(torch.zeros(2))

    callback = hot(stages=("train", "validate"), scope="step", compile_optimizer=False, parity="off")
    fit(seeded(CompilesToo), [callback], val=loader(48), max_epochs=6)
    for stage, report in callback.reports.items():
        in_steps = sum(phase.total_s for phase in report.phases)
        own = [e["seconds"] for e in report.events if e["kind"] == "compiled"]
        assert 0 < report.compile_s < in_steps, stage
        assert own, stage
    torch._dynamo.reset()


def test_fit_then_test_keep_both_reports() -> None:
    callback = hot(stages=("train", "test"), scope="step", compile_optimizer=False)
    model = seeded(Evaluates)
    trainer = fit(model, [callback])
    trainer.test(model, loader(), verbose=False)
    assert set(callback.reports) == {"train", "test"}
    assert callback.report.steps == 48


def test_an_exception_in_validation_gives_everything_back() -> None:
    class Fails(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 2 and batch_idx == 4:
                raise ValueError("mine")

    model, callback = seeded(Fails), hot(stages=("train", "validate"), scope="regions")
    with pytest.raises(ValueError, match="mine"):
        fit(model, [callback], val=loader(48))
    assert all("_compiled_call_impl" not in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "asked", [{"backend": "inductor", "mode": "reduce-overhead"}, {"backend": "cudagraphs"}]
)
def test_predict_with_cuda_graphs_is_declined_with_the_reason(asked: dict[str, str]) -> None:
    callback = hot(stages=("predict",), **asked)
    make_trainer([callback]).predict(seeded(Evaluates), loader())
    assert callback.report.phase == "declined"
    assert "CUDA graphs overwrite" in callback.report.reason


@pytest.mark.parametrize(("interval", "validations"), [(1.0, 3), (6, 7), (0.25, 15)])
def test_what_is_left_of_validation_counts_those_to_come(interval: Any, validations: int) -> None:
    seen: list[int | None] = []

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                seen.append(remaining_batches(self.trainer, "validate", 0.1))

    fit(seeded(Looks), val=loader(16), max_epochs=4, val_check_interval=interval)
    assert seen[0] == 2 + validations * 2
    assert seen[-1] in (1, 2)


def test_what_is_left_of_validation_by_the_clock_is_unknown() -> None:
    seen: list[int | None] = []

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(remaining_batches(self.trainer, "validate", 0.1))

    every = timedelta(microseconds=1)
    fit(seeded(Looks), val=loader(16), max_epochs=2, val_check_interval=every, num_sanity_val_steps=0)
    assert len(seen) > 4
    assert set(seen) == {None}


@pytest.mark.parametrize(
    ("mode", "steps"), [("sequential", 6), ("min_size", 2), ("max_size", 4), ("max_size_cycle", 4)]
)
def test_what_is_left_of_loaders_side_by_side(mode: str, steps: int) -> None:
    seen: list[int | None] = []

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append(remaining_batches(self.trainer, "validate", 0.1))

    both = CombinedLoader({"a": loader(16), "b": loader(32)}, mode)
    make_trainer([]).validate(seeded(Looks), both, verbose=False)
    assert seen == list(range(steps, 0, -1))


@pytest.mark.parametrize(("steps", "batches"), [(1, 1), (2, 1), (1, 4)], ids=["one", "two", "accumulates"])
def test_what_is_left_of_max_steps_with_manual_optimization(steps: int, batches: int) -> None:
    """``max_steps`` counts steps of optimizers, as many in a batch as the model makes."""
    seen: list[int | None] = []

    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(remaining_batches(self.trainer, "train", 0.1))
            self.manual_backward(self.loss(batch))
            if (batch_idx + 1) % batches == 0:
                for _ in range(steps):
                    self.optimizers().step()
                self.optimizers().zero_grad()

    fit(seeded(Manual), max_epochs=-1, max_steps=12 * steps // batches)
    assert len(seen) == 12
    assert set(seen[:batches]) == {None}
    assert all(left is not None for left in seen[batches:])
    for done, left in enumerate(seen):
        # the batches since the last step are not known to be a part of the next one
        assert left is None or 12 - done - batches <= left <= 2 * (12 - done) + batches
