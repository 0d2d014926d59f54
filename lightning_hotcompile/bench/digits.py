"""Handwritten digits of 8x8 pixels that scikit-learn brings along, and two small classifiers."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]
CLASSES = 10
SIDE = 8
BRIGHTEST = 16.0  # load_digits counts 0 to 16 dark pixels in each 4x4 field


class DigitsClassifier(LightningModule):
    """Cross-entropy training of ``net``, with accuracies of training and validation.

    The training accuracy is a metric object inside ``training_step``, as in many users' modules.

    Args:
        net: images of shape ``(batch, 1, 8, 8)`` to logits of shape ``(batch, 10)``.
        lr: AdamW's learning rate.
        weight_decay: AdamW's decay.
    """

    def __init__(self, net: nn.Module, *, lr: float, weight_decay: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr
        self.weight_decay = weight_decay
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape ``(batch, 10)`` from images of shape ``(batch, 1, 8, 8)``."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy; logs ``train/loss`` and ``train/accuracy``."""
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.train_accuracy(logits, labels)
        self.log("train/accuracy", self.train_accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/accuracy`` over the whole epoch and all ranks."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


class DigitsMLP(DigitsClassifier):
    """Fully connected layers with ReLU.

    Args:
        hidden: width of each hidden layer.
        n_hidden: number of hidden layers.
        lr: AdamW's learning rate.
        weight_decay: AdamW's decay.
    """

    def __init__(
        self, *, hidden: int = 128, n_hidden: int = 2, lr: float = 1e-3, weight_decay: float = 1e-2
    ) -> None:
        widths = [SIDE * SIDE, *[hidden] * n_hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        super().__init__(
            nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)), lr=lr, weight_decay=weight_decay
        )
        self.save_hyperparameters()


class ConvBlock(nn.Module):
    """3x3 convolution, BatchNorm, ReLU; height and width are kept."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, channels_in, height, width)`` to ``(batch, channels_out, height, width)``."""
        return F.relu(self.norm(self.convolution(x)))


class DigitsCNN(DigitsClassifier):
    """Convolutions with BatchNorm, whose running statistics a second run of a step would spoil.

    Args:
        channels: feature maps of every convolution.
        n_block: identical convolution blocks after the first one.
        lr: AdamW's learning rate.
        weight_decay: AdamW's decay.
    """

    def __init__(
        self, *, channels: int = 32, n_block: int = 3, lr: float = 1e-3, weight_decay: float = 1e-2
    ) -> None:
        blocks = [ConvBlock(1, channels), *(ConvBlock(channels, channels) for _ in range(n_block))]
        net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, CLASSES))
        super().__init__(net, lr=lr, weight_decay=weight_decay)
        self.save_hyperparameters()


class Digits(LightningDataModule):
    """``sklearn.datasets.load_digits``: 1,797 images in ten classes.

    A training batch is ``(images, labels)``: float32 of shape ``(batch_size, 1, 8, 8)`` in 0..1, and
    int64 of shape ``(batch_size,)``.

    Args:
        batch_size: images in a batch, on each rank.
        val_fraction: share of the images that is kept for validation.
        drop_last: leave out the incomplete last training batch of an epoch.
        seed: seed of the split and of the order of training.
        num_workers: processes that load; the data is in memory, so 0 is fastest.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        val_fraction: float = 0.2,
        drop_last: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.seed = seed
        self._parts: list[Dataset[tuple[Tensor, ...]]] = []

    def setup(self, stage: str) -> None:
        """Read and split the images, once."""
        if self._parts:
            return
        # Imported here: scikit-learn comes with the recipes, not with the package.
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / BRIGHTEST
        labels = torch.tensor(digits.target, dtype=torch.int64)
        fractions = [1.0 - self.val_fraction, self.val_fraction]
        split = torch.Generator().manual_seed(self.seed)
        self._parts = list(random_split(TensorDataset(images, labels), fractions, generator=split))

    def _loader(self, part: int, shuffle: bool, drop_last: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self._parts[part],
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(self.seed),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled training images."""
        return self._loader(0, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The validation images, in order; the last batch may be smaller."""
        return self._loader(1, shuffle=False, drop_last=False)
