"""The picture of a run for the loggers, with and without matplotlib."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.plan import compile_cost
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.run.flip import allocated_peak_mb
from lightning_hotcompile.run.reporting import _region_proof, timeline_image
from lightning_hotcompile.swap.installation import Proof
from tests.functions import tells_nothing
from tests.hot import STEP, hot
from tests.models import Small, fit, loader, seeded
from tests.view.examples import events, report


def logged_images(folder: Path) -> list[Any]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["images"]
    assert tags in ([], ["hotcompile/timeline"])
    return [event for tag in tags for event in found.Images(tag)]


def test_it_is_an_array_of_pixels() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    image = timeline_image(report(), events(), "train")
    assert image is not None
    assert image.shape[2] == 3


def test_without_a_timed_step_there_is_none() -> None:
    assert timeline_image(dataclasses.replace(report(), samples=()), events(), "train") is None


def test_without_matplotlib_there_is_none(no_matplotlib: None) -> None:
    assert timeline_image(report(), events(), "train") is None


@pytest.mark.parametrize(
    ("runs", "note"), [(4, "compiled code ran in 4 of 10 calls; the others did not fit it"), (5, "")]
)
def test_a_region_whose_calls_are_mostly_eager_says_so(runs: int, note: str) -> None:
    region = Region(name="head", kind="module", members=("head",), class_name="Linear")
    proof = Proof(region=region, graphs=1, calls=10, could_compile=True, runs=runs, compile_s=0.1, error=None)
    found = _region_proof(proof)
    assert (found.proven, found.note) == (True, note)


def test_a_training_logs_it_once_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    callback = hot(**STEP)
    fit(seeded(Small), [callback], logger=TensorBoardLogger(tmp_path, name="", version=""), max_epochs=2)
    (event,) = logged_images(tmp_path)
    assert (event.step, event.width > event.height) == (callback.report.steps, True)


def test_a_training_without_matplotlib_logs_none_and_says_nothing(
    tmp_path: Path, no_matplotlib: None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HotCompileWarning)
        fit(
            seeded(Small),
            [hot(**STEP)],
            logger=TensorBoardLogger(tmp_path, name="", version=""),
            max_epochs=1,
        )
    assert logged_images(tmp_path) == []


@pytest.mark.parametrize(("allocated", "peak"), [(3 * 2**20, 3.0), (0, None)])
def test_a_gpu_that_was_not_used_has_no_peak(
    allocated: int, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on the CPU can initialize CUDA; what was not measured is never 0."""
    for name, value in (
        ("is_available", True),
        ("is_initialized", True),
        ("max_memory_allocated", allocated),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert allocated_peak_mb() == peak


def test_nor_has_one_whose_allocator_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RAPIDS' RMM; it must not cost the report."""
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", tells_nothing)
    assert allocated_peak_mb() is None


def test_the_speed_up_is_that_of_the_signature_that_the_reason_is_about() -> None:
    """A smaller last batch of each epoch is hot later, and its first steps are none to report."""
    callback = hot(threshold=3, **STEP)
    fit(seeded(Small), [callback], train=loader(36), max_epochs=14)
    settled = [e for e in callback.report.events if e.get("phase") == "settling"]
    assert len(settled) == 2, "both sizes were compiled"
    assert callback.report.phase == "steady"
    assert callback.report.speedup is not None
    assert str(callback.report.speedup) in callback.report.reason


class TestWhyEager:
    """What is said of a region whose compiled code never ran."""

    def notes(self, model: Small, **options: Any) -> list[str]:
        callback = hot(**options)
        fit(model, [callback], max_epochs=6)
        return [note for note in callback.report.notes if "did not run compiled" in note]

    def test_one_that_is_called_after_all_was_compiled(self) -> None:
        class CallsLate(Small):
            def __init__(self) -> None:
                super().__init__()
                self.spare = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x + self.spare(x) if self.global_step > 40 else x)

        (note,) = self.notes(seeded(CallsLate), scope="regions")
        assert note.startswith("region spare did not run compiled: it was first called when nothing was ")

    @pytest.mark.parametrize(
        ("first", "rate", "why"),
        [
            (
                0,
                0.0,
                "whenever it could be compiled its learning rate was 0, or its state was yet to be made",
            ),
            (41, 0.1, "it was first called when nothing was compiled any longer"),
            (1000, 0.1, "the optimizer made no step while it was in place"),
        ],
    )
    def test_an_optimizer(self, first: int, rate: float, why: str) -> None:
        class OneIsLate(Small):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                early, late = self.optimizers()  # type: ignore[misc]
                step = self.global_step
                for optimizer in (early, late):
                    optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                early.step()
                if step >= first:
                    late.step()

            def configure_optimizers(self) -> Any:
                others = [*self.inp.parameters(), *self.head.parameters()]
                return [
                    torch.optim.SGD(self.blocks.parameters(), lr=1e-2, momentum=0.9),
                    torch.optim.SGD(others, lr=rate, momentum=0.9),
                ]

        notes = self.notes(seeded(OneIsLate), scope="regions", compile_optimizer=True)
        assert f"region optimizer 1 did not run compiled: {why}" in notes

    def test_a_function_that_is_left_to_python(self) -> None:
        class Breaks(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                for _ in range(1):
                    torch._dynamo.graph_break()
                    x = x + 1
                return x

        class HasBreaks(Small):
            def __init__(self) -> None:
                super().__init__()
                self.odd = Breaks()

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(self.odd(x))

        notes = self.notes(seeded(HasBreaks), scope="pattern", targets=["odd", "blocks.*"])
        assert notes == ["region odd did not run compiled: no graph was captured in its calls"]


def test_a_run_that_waits_though_its_step_is_hot_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 1e6)
    callback = hot(cost_gate=True, on_error="raise")
    fit(seeded(Small), [Stops(), callback], max_epochs=-1)
    assert callback.report.phase == "observing"
    assert callback.report.reason.startswith("waits until it has spent as much")
    assert "waits until it has spent as much" in headline(callback.report)
    too_early = hot(cost_gate=True, threshold=1000)
    fit(seeded(Small), [Stops(), too_early], max_epochs=-1)
    assert "until a step has come back often enough" in too_early.report.reason


class Stops(pl.Callback):
    """Ends a training of unknown length."""

    def __init__(self, after: int = 20) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.after
