"""Models that several cells share: as small as can be, since each cell compiles one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Net, loader


class TinyBlock(nn.Module):
    """A residual layer."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.layer(x)))


class AdamNet(Net):
    """Two blocks of width 8, AdamW with a schedule per step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(width=8, n_block=0)
        self.blocks = nn.ModuleList(TinyBlock(8, dropout) for _ in range(2))


class SgdNet(AdamNet):
    """SGD: other than AdamNet it does not enlarge the last digit of a gradient that is zero in truth."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Searches(SgdNet):
    """Has the attributes that Lightning's finders set, and its own loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 4

    def train_dataloader(self) -> Any:
        return loader(96, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(16, self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
