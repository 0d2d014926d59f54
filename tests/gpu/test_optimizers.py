"""On a GPU an optimizer counts in host memory; compiled steps count on the device, and nobody waits."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import Optimizer

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"capturable": True}),
    ("Adagrad", {}),
    ("ASGD", {}),
    ("RAdam", {}),
    ("RMSprop", {}),
    ("SGD", {"momentum": 0.9}),
]


class Trained(Net):
    """With an optimizer of one kind."""

    kind = "AdamW"
    settings: dict[str, Any]

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.kind)(self.parameters(), lr=1e-2, **self.settings)


class Frozen(Trained):
    """One group has no gradients, and so no state."""

    def configure_optimizers(self) -> Any:
        self.head.requires_grad_(False)
        groups = [{"params": self.blocks.parameters()}, {"params": self.head.parameters()}]
        return torch.optim.AdamW(groups, lr=1e-2)


class NobodyWaits(pl.Callback):
    """Late updates raise where they wait for the GPU; of the first runs it is asked whether all is finite."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._mode("default"))

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._mode("error" if trainer.global_step > 60 else "default")

    @staticmethod
    def _mode(mode: str) -> None:
        torch.cuda.set_sync_debug_mode(mode)


def kept_by(optimizer: Optimizer) -> list[tuple[str, str, float]]:
    """The scalars of its state, with where they are."""
    return [
        (name, value.device.type, round(value.item(), 5))
        for entries in optimizer.state.values()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    ]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_state_and_settings_are_those_of_eager(kind: str, settings: dict[str, Any], scope: str) -> None:
    trained = type(kind, (Trained,), {"kind": kind, "settings": settings})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(backend="inductor", scope=scope, compile_optimizer=True)
    trainers = [fit(plain, accelerator="gpu"), fit(model, [callback], accelerator="gpu")]
    optimizers = [trainer.optimizers[0] for trainer in trainers]
    assert callback.report.phase == "steady", callback.report.reason
    assert any(region.runs for region in callback.report.regions if region.name.startswith("optimizer"))
    assert kept_by(optimizers[0]) == kept_by(optimizers[1])
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    assert groups[0] == groups[1]
    assert_same(plain, model, tolerance=1e-3)


@pytest.mark.parametrize("model", [Trained, Frozen])
def test_no_update_waits_for_the_gpu_whichever_way_it_goes(model: type[Trained]) -> None:
    model.settings = {}
    callback = hot(backend="inductor", scope="step", compile_optimizer=True)
    trainer = fit(seeded(model), [callback, NobodyWaits()], accelerator="gpu", max_epochs=8)
    assert trainer.global_step > 80
    assert callback.report.phase == "steady", callback.report.reason
    assert not any(group["capturable"] for group in trainer.optimizers[0].param_groups)


def test_a_graph_can_be_kept_for_a_second_backward() -> None:
    """The backward pass of a GPU has a thread of its own; since torch 2.13 that has its own settings."""

    class Twice(Trained):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()

    Twice.settings = {}
    plain, model = seeded(Twice), seeded(Twice)
    callback = hot(backend="inductor", scope="module")
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model, tolerance=1e-3)
