"""Nobody waits for the GPU in a compiled step, and its times are the GPU's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_hotcompile import HotCompile
from tests.hot import assert_proven, hot
from tests.models import Net, fit, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

GPU: dict[str, Any] = {"accelerator": "gpu", "max_epochs": 10}


class Quiet(Net):
    """Nothing is shown in a progress bar, which would ask for its value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class NobodyWaits(pl.Callback):
    """A wait in a late step is an error, from its beginning on. It comes before all other callbacks."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if trainer.global_step > 80 else "default")


class Waits(pl.Callback):
    """Who comes after all other callbacks may wait again: at the end of each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scope", [None, "step", "regions"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_no_step_waits(scope: str | None, dropout: float) -> None:
    """Nor one without the callback: else this would say nothing."""
    callbacks: list[Any] = []
    if scope is not None:
        callbacks = [hot(backend="inductor", scope=scope, compile_optimizer=scope == "step")]
    trainer = fit(seeded(Quiet, dropout=dropout), [NobodyWaits(), *callbacks, Waits()], **GPU)
    assert trainer.global_step > 100
    for callback in callbacks:
        assert_proven(callback.report)
        assert callback.report.phase == "steady", callback.report.reason


def test_all_steps_are_booked_with_times_of_the_gpu() -> None:
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    trainer = fit(seeded(Quiet), [callback], **GPU)
    report = callback.report
    assert sum(phase.steps for phase in report.phases) == report.steps == trainer.global_step
    assert report.eager_ms is not None
    assert report.compiled_ms is not None
    assert 0.01 < report.eager_ms.median < 1000
    assert report.speedup is not None
    assert report.speedup.n >= 10


class Slow(Quiet):
    """The GPU works on for long after the host has launched it all."""

    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch)
        busy = torch.ones(4096, 4096, device=found.device)
        for _ in range(20):
            busy = (busy @ busy).clamp(0, 1)
        return found + 0 * busy.mean()


def test_the_time_of_a_step_is_not_that_of_its_launches() -> None:
    callback = HotCompile(threshold=3, cost_gate=False, prewarm=False, backend="aot_eager", store=None)
    fit(seeded(Slow), [callback], accelerator="gpu", max_epochs=4)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).clamp(0, 1)
    end.record()
    end.synchronize()
    assert callback.report.eager_ms is not None
    assert callback.report.eager_ms.median > 0.5 * begin.elapsed_time(end)


def test_an_accelerator_is_told_of_no_kernel_for_the_cpu() -> None:
    callback = HotCompile(threshold=3, cost_gate=False, prewarm=False, backend="aot_eager", store=None)
    fit(seeded(Quiet), [callback], accelerator="gpu")
    assert not any("fused kernel" in note for note in callback.report.notes), callback.report.notes
