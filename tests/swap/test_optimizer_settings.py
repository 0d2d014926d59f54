"""A training step that reads or writes the settings of its optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


class ByHand(Net):
    """Raises the learning rate itself, as many scripts do for a warm-up."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 if self.current_epoch < 2 else 0.005
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)


def settings(trainer: Trainer) -> dict[str, Any]:
    return {name: value for name, value in trainer.optimizers[0].param_groups[0].items() if name != "params"}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_it_sets_the_learning_rate_and_nothing_else(kind: type[torch.optim.Optimizer]) -> None:
    plain, model = seeded(ByHand, kind=kind), seeded(ByHand, kind=kind)
    without = fit(plain, max_epochs=5)
    callback = hot(scope="step", compile_optimizer=False)
    trainer = fit(model, [callback], max_epochs=5)
    assert callback.report.phase == "steady"
    assert [r.proven for r in callback.report.regions] == [True]
    assert_same(plain, model)
    assert settings(trainer) == settings(without)
    assert type(settings(trainer)["lr"]) is float


class Reads(ByHand):
    """Weighs its loss by the learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.optimizers().param_groups[0]["lr"])


def test_one_that_is_read_ties_no_parameter_to_its_address() -> None:
    plain, model = seeded(Reads), seeded(Reads)
    without = fit(plain, max_epochs=3)
    callback = hot(scope="step", compile_optimizer=False)
    trainer = fit(model, [callback], max_epochs=3)
    assert [r.proven for r in callback.report.regions] == [True]
    assert_same(plain, model)
    assert settings(trainer) == settings(without)
    marks = {getattr(p, "_dynamo_static_input_type", None) for p in model.parameters()}
    assert "guarded" not in marks
