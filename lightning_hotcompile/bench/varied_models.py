"""More small models, each of another kind: convolutions, recurrences, mixers, embeddings."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualConvs(nn.Module):
    """A small residual network with GroupNorm and SiLU."""

    def __init__(self, channels: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, channels),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.GroupNorm(4, channels),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from images ``(batch, 3, height, width)``."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(F.silu(x).mean((2, 3)))
        return y


class SeparableConvs(nn.Module):
    """Depthwise and pointwise convolutions with BatchNorm, as in networks for phones."""

    def __init__(self, channels: int, blocks: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)]
        for _ in range(blocks):
            layers += [
                nn.BatchNorm2d(channels),
                nn.Hardswish(),
                nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
                nn.BatchNorm2d(channels),
                nn.Hardswish(),
                nn.Conv2d(channels, channels, 1, bias=False),
            ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from images ``(batch, 3, height, width)``."""
        y: Tensor = self.head(self.layers(images).mean((2, 3)))
        return y


class PatchTransformer(nn.Module):
    """Patches of an image through transformer encoder layers, with dropout."""

    def __init__(self, patch: int, patches: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.place = nn.Parameter(0.02 * torch.randn(patches, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from images ``(batch, 3, height, width)``."""
        x = self.embed(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


class MixerBlock(nn.Module):
    """A perceptron across tokens, then one across channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm_width = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.width = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, tokens, width)`` in and out."""
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.width(self.norm_width(x))
        return y


class Forecaster(nn.Module):
    """A GRU over a series, and the next value from its last state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, inputs))

    def forward(self, series: Tensor) -> Tensor:
        """Values ``(batch, inputs)`` from series ``(batch, time, inputs)``."""
        y: Tensor = self.head(self.gru(series)[0][:, -1])
        return y


class GatedRecurrence(nn.Module):
    """A recurrence written out in Python, step by step of time: many small operations."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, 2 * width)
        self.state = nn.Linear(width, 2 * width, bias=False)
        self.head = nn.Linear(width, classes)
        self.width = width

    def forward(self, series: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from series ``(batch, time, inputs)``."""
        state = series.new_zeros(series.shape[0], self.width)
        for x in self.inputs(series).unbind(1):
            gate, value = (x + self.state(state)).chunk(2, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(value)
        y: Tensor = self.head(state)
        return y


class DilatedConvs(nn.Module):
    """Causal convolutions over a series, each with twice the reach of the one before."""

    def __init__(self, inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(inputs, width, 1)
        self.convs = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2**i) for i in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from series ``(batch, inputs, time)``."""
        x = self.stem(series)
        for i, conv in enumerate(self.convs):
            gate, value = conv(F.pad(x, (2 * 2**i, 0))).chunk(2, 1)
            x = x + torch.sigmoid(gate) * torch.tanh(value)
        y: Tensor = self.head(x[..., -1])
        return y


class Tabular(nn.Module):
    """Columns of categories, each with its embedding, their products, and a perceptron with BatchNorm."""

    def __init__(self, columns: int, categories: int, width: int, classes: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(categories, width) for _ in range(columns))
        self.net = nn.Sequential(
            nn.Linear((columns + 1) * width, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )

    def forward(self, columns: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from categories ``(batch, columns)``."""
        rows = [embed(column) for embed, column in zip(self.embeddings, columns.unbind(1), strict=True)]
        stacked = torch.stack(rows, 1)
        crossed = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1))
        y: Tensor = self.net(torch.cat([*rows, crossed], -1))
        return y


class UNet(nn.Module):
    """Down, up, and a way across, for images in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = self._convs(1, width)
        self.down = self._convs(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = self._convs(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _convs(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Shape ``(batch, 1, height, width)`` in and out, both sides even."""
        across = self.first(images)
        below = self.up(self.down(F.max_pool2d(across, 2)))
        y: Tensor = self.head(self.last(torch.cat([across, below], 1)))
        return y


class Sines(nn.Module):
    """A field over coordinates, with sines for activations."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [2, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        """Values ``(points, 1)`` at coordinates ``(points, 2)``."""
        x = points
        for layer in self.layers:
            x = torch.sin(5 * layer(x))
        y: Tensor = self.head(x)
        return y
