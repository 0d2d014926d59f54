"""How a training flips, and what of that is told."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
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
