"""What is looked for where a training has its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.run.fused_memory import FusedMemory
from lightning_hotcompile.run.side_gains import SideGains


def looked_for(device: str) -> SideGains:
    """After the first steps; a stand-in for a GPU is where parameters have no memory."""
    on = torch.device("meta" if device == "cuda" else device)
    optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device=on))])]
    trainer: Any = SimpleNamespace(
        optimizers=optimizers, world_size=1, strategy=SimpleNamespace(optimizers=optimizers)
    )
    module: Any = SimpleNamespace(device=torch.device(device))
    story: Any = None
    side = SideGains(trainer, module, HotCompileConfig(), "train", story, FusedMemory(None, reads=False))
    for steps in range(1, 20):
        side.consider_step(steps, [])
    return side


@pytest.mark.parametrize(("device", "told"), [("cpu", 1), ("cuda", 0)])
def test_of_kernels_for_the_cpu_nothing_is_said_on_a_gpu(device: str, told: int) -> None:
    side = looked_for(device)
    assert len([note for note in side.in_words() if "fused kernel" in note]) == told
    assert not side.fused.is_busy
