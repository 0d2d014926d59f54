"""How a training flips, and what of that is told."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler

from lightning_hotcompile.swap.compile_timer import CompileTimer
from tests.hot import hot
from tests.models import Batches, Net, fit, seeded


def test_what_is_compiled_after_a_reset_by_the_user_is_in_the_compile_time() -> None:
    listeners: list[int] = []

    class Resets(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        told = [each for each in callback_handler.start_callbacks if isinstance(each.__self__, CompileTimer)]
        listeners.append(len(told))
        return graph

    callback = hot(scope="step", backend=backend, compile_optimizer=False, dynamic=False)
    sizes = [8] * 8 + [4] * 12
    fit(
        seeded(Net),
        [callback, Resets()],
        train=torch.utils.data.DataLoader(Batches(sizes), None),
        max_epochs=1,
    )
    assert listeners == [1, 1]


class Part(nn.Module):
    """Computes one of two things, as one of its attributes says."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(16, width)
        self.name = name
        setattr(self, name, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() if getattr(self, self.name) else self.layer(x).relu()


class TwoParts(Net):
    """Two regions, and each asks for another attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), Part("is_warm", 16), Part("is_late", 24), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TurnsBoth(pl.Callback):
    """From one step on both attributes are set."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 8:
            pl_module.net[1].is_warm = pl_module.net[2].is_late = True


def test_each_recompile_of_a_step_has_its_own_reason() -> None:
    callback = hot(scope="module", targets=["net.1", "net.2"], compile_optimizer=False)
    fit(seeded(TwoParts), [callback, TurnsBoth()])
    events = [event for event in callback.report.events if event["kind"] == "recompiled"]
    told = {event["region"]: event["reason"] for event in events}
    assert set(told) == {"net.1", "net.2"}
    assert "is_warm" in told["net.1"]
    assert "is_late" not in told["net.1"]
    assert "is_late" in told["net.2"]
    assert "is_warm" not in told["net.2"]
