"""Small LightningModules that tests share: real training, seconds at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(pl.LightningModule):
    """Blocks in a row, cross-entropy, AdamW with a schedule per step."""

    def __init__(self, width: int = 16, n_block: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(n_block))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Small(Net):
    """One block: where nothing depends on how many there are, its optimizer is traced in half of the time."""

    def __init__(self, width: int = 16, n_block: int = 1, dropout: float = 0.0) -> None:
        super().__init__(width, n_block, dropout)


def loader(n: int = 96, batch_size: int = 8, seed: int = 0) -> DataLoader:
    """Batches of 8 features and a class of 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    y = torch.randint(0, 3, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size)


class Batches(torch.utils.data.IterableDataset[Any]):
    """Batches of given sizes, in this order."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for n in self.sizes:
            yield torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def make_trainer(callbacks: list[Any] | None = None, **options: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "max_epochs": 4,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=callbacks or [], **{**settings, **options})


def fit(
    model: pl.LightningModule,
    callbacks: list[Any] | None = None,
    *,
    train: Any = None,
    val: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train a model and return its Trainer."""
    torch.manual_seed(1)
    trainer = make_trainer(callbacks, **options)
    trainer.fit(model, train if train is not None else loader(), val)
    return trainer


def seeded(factory: Any, *args: Any, **kwargs: Any) -> Any:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    return factory(*args, **kwargs)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
