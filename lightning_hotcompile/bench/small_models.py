"""Small models that differ in what a compiler can do for them; each is seconds to train on a CPU."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Supervised(LightningModule):
    """Trains ``net`` on pairs of inputs and targets; logs its loss.

    Args:
        net: inputs to predictions.
        loss: ``cross_entropy`` (logits of shape ``(..., classes)``) or ``mse``.
        optimizer: ``AdamW`` or ``SGD``.
        lr: learning rate.
    """

    def __init__(
        self, net: nn.Module, *, loss: str = "cross_entropy", optimizer: str = "AdamW", lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.net = net
        self.kind_of_loss = loss
        self.kind_of_optimizer = optimizer
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        """What ``net`` makes of the inputs; ``model.compile()`` compiles what comes through here."""
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over all predictions."""
        x, y = batch
        out = self(x)
        if self.kind_of_loss == "mse":
            loss = F.mse_loss(out, y)
        else:
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that was asked for, at a constant rate."""
        if self.kind_of_optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class NormBlock(nn.Module):
    """``x + dropout(gelu(linear(norm(x))))``: on CPUs compilers have made it slower than eager."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), self.dropout, self.training)


class GatedBlock(nn.Module):
    """A residual block whose inner width can differ from its neighbours'."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        y: Tensor = x + self.down(torch.sigmoid(gate) * value)
        return y


class ElementwiseChain(nn.Module):
    """A linear layer and many element-wise operations after it."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, length))
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        x = self.linear(x)
        for i in range(self.length):
            x = torch.tanh(x * self.scales[i]) + 0.1 * torch.sin(x)
        return x


class LSTMTagger(nn.Module):
    """Embedding, LSTM and a linear layer: most of its time is in one fused kernel already."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocabulary)`` from tokens ``(batch, time)``."""
        y: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return y


class BatchNormCNN(nn.Module):
    """Convolutions with BatchNorm on images of 8x8 pixels."""

    def __init__(self, channels: int = 32, classes: int = 10) -> None:
        super().__init__()
        widths = [1, channels, channels, 2 * channels]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            ]
        )
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` from images ``(batch, 1, 8, 8)``."""
        y: Tensor = self.head(self.layers(images).mean((2, 3)))
        return y


class TextMixer(nn.Module):
    """Causal attention over sequences whose length differs from batch to batch."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocabulary)`` from tokens ``(batch, time)``."""
        time = tokens.shape[1]
        mask = torch.full((time, time), float("-inf"), device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        y: Tensor = self.head(x)
        return y


class Perceptron(nn.Module):
    """Three linear layers; not an ``nn.Sequential``, on which ``.compile()`` would be without effect."""

    def __init__(self, first: int, width: int, last: int) -> None:
        super().__init__()
        self.up = nn.Linear(first, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.down = nn.Linear(width, last)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, first)`` in, ``(batch, last)`` out."""
        y: Tensor = self.down(F.gelu(self.middle(F.gelu(self.norm(self.up(x))))))
        return y


class GAN(LightningModule):
    """Generator and discriminator with an optimizer each, by manual optimization."""

    def __init__(self, latent: int = 32, width: int = 128, out: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = Perceptron(latent, width, out)
        self.discriminator = Perceptron(out, width, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One step of each, with the loss of least squares."""
        real = batch[0].flatten(1)
        for_generator, for_discriminator = self.optimizers()  # type: ignore[attr-defined]
        fake = self.generator(torch.randn(len(real), self.latent, device=real.device))
        self.toggle_optimizer(for_discriminator)
        loss = (self.discriminator(real) - 1).square().mean() + self.discriminator(
            fake.detach()
        ).square().mean()
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.toggle_optimizer(for_generator)
        generator_loss = (self.discriminator(fake) - 1).square().mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log_dict({"discriminator": loss, "generator": generator_loss})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for both."""
        return [
            torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.99))
            for net in (self.generator, self.discriminator)
        ]
