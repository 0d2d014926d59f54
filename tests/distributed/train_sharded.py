"""Trains with FSDP2 on two processes (gloo, CPU), with and without the callback; for ``train_in_turn.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.hot import hot
from tests.models import Net, make_trainer, seeded

BATCHES = 60


class Sharded(Net):
    """Each block is sharded by itself, and the rest with the root."""

    def configure_model(self) -> None:
        if not hasattr(self, "was_sharded"):
            self.was_sharded = True
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def batches(rank: int) -> list[Any]:
    """Batches of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(BATCHES, 8, 8, generator=generator)
    y = torch.randint(0, 3, (BATCHES, 8), generator=generator)
    return [(x[i], y[i]) for i in range(BATCHES)]


def train(callbacks: list[Any]) -> dict[str, Tensor]:
    """Whole parameters after one epoch."""
    torch._dynamo.reset()
    model = seeded(Sharded)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = make_trainer(
        callbacks, devices=2, max_epochs=1, strategy=strategy, use_distributed_sampler=False
    )
    trainer.fit(model, DataLoader(batches(int(os.environ.get("LOCAL_RANK", "0"))), batch_size=None))
    assert "forward" not in vars(model.blocks[0])
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def main(file: Path) -> None:
    """Trainings without and with the callback; rank 0 writes what it found into the file."""
    torch.set_num_threads(1)
    plain, found = train([]), []
    for options in ({}, {"compile_optimizer": True}):
        callback = hot(on_error="eager", **options)
        weights = train([callback])
        gap = max((weights[name] - value).abs().max().item() for name, value in plain.items())
        found.append({"report": callback.report.to_dict(), "gap": gap})
    if os.environ.get("LOCAL_RANK", "0") == "0":
        file.write_text(json.dumps(found), encoding="utf-8")
