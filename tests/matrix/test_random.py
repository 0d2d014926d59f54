"""Random numbers are those of a run without the callback, to the last one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix.compare import Cell, check, in_scopes
from tests.matrix.nets import SgdNet, TinyBlock
from tests.models import loader


class Drops(SgdNet):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class DropsInTheStep(SgdNet):
    """Noise made in the step itself, beside dropout in the blocks."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = F.dropout(x, 0.2, training=self.training) + 0.1 * torch.randn_like(x)
        keep = torch.bernoulli(torch.full_like(x, 0.9))
        return F.cross_entropy(self(x * keep), y) * (0.5 + torch.rand(()))


class Diffusion(SgdNet):
    """Random times and noise, as a diffusion model draws them."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        t = torch.randint(1, 10, (len(x), 1)) / 10
        noise = torch.randn_like(x)
        hidden = self.inp(x * (1 - t) + noise * t)
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(self.head(hidden), noise[:, :3])


class Shuffles(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        order = torch.randperm(len(batch[0]))
        return super().loss((batch[0][order], batch[1])) + 0 * order.sum()


class PythonAndNumpy(SgdNet):
    """Draws from Python's and numpy's generators too, outside of what is compiled."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.9 + 0.1 * random.random())
        batch[0].add_(float(np.random.rand()) * 0.1)


class NumpyInTheStep(SgdNet):
    """Numbers of numpy's global generator are drawn where the loss is made."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x * float(np.random.uniform(0.9, 1.1)) + torch.from_numpy(np.random.rand(8)).float() * 0.1
        return super().loss((x, y))


class Mixup(SgdNet):
    """Two batches mixed by a number of numpy's, as many image models do it."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        logits = self(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


class SometimesByNumpy(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if np.random.rand() < 0.5:
            x = x.flip(0)
        start = np.random.randint(4)
        return super().loss((torch.cat([x[start:], x[:start]]), y))


class NumpyGeneratorInTheStep(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x * float(self.rng.uniform(0.9, 1.1)), y))


class PythonInTheStep(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x * (0.9 + 0.1 * random.random()) + 0.1 * self.rng.uniform(-1, 1)
        return super().loss((x.flip(0) if random.randint(0, 1) else x, y))


class RandomBlock(TinyBlock):
    """Draws from Python's, numpy's and a generator of its own in the forward of a block."""

    def __init__(self) -> None:
        super().__init__(8)
        self.rng, self.generator = np.random.default_rng(3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3:
            return x
        noise = torch.randn(x.shape, generator=self.generator)
        return super().forward(x * float(np.random.uniform(0.9, 1.1)) + 0.1 * self.rng.random() * noise)


class InTheBlocks(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RandomBlock() for _ in range(2))


class OwnGenerator(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(torch.randn(batch[0].shape, generator=self.generator) * 0.1)


class Rrelu(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.RReLU()) for _ in range(2))


CELLS = [
    Cell(name="dropout", model=Drops, val=lambda: loader(16)),
    Cell(name="dropout and noise in the step", model=DropsInTheStep),
    Cell(name="diffusion", model=Diffusion),
    Cell(name="permutation", model=Shuffles),
    Cell(name="Python and numpy", model=PythonAndNumpy),
    Cell(name="numpy in the step", model=NumpyInTheStep),
    Cell(name="mixup", model=Mixup),
    Cell(name="sometimes, by numpy", model=SometimesByNumpy),
    Cell(name="numpy's generator in the step", model=NumpyGeneratorInTheStep),
    Cell(name="Python in the step", model=PythonInTheStep),
    Cell(name="generator of one's own", model=OwnGenerator),
    Cell(name="in the blocks", model=InTheBlocks),
    Cell(name="RReLU", model=Rrelu),
    Cell(
        name="dropout and accumulation", model=Drops, trainer={"accumulate_grad_batches": 2, "max_epochs": 6}
    ),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_trains_as_without_with_graphs_run_as_captured(cell: Cell) -> None:
    check(Cell(**{**vars(cell), "options": {"backend": "eager"}}), "regions")
