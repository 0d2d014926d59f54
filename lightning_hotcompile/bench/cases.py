"""The cases of the benchmarks: a model and its batches, both seeded, by name."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightning_hotcompile.bench.char_gpt import CharGPT
from lightning_hotcompile.bench.own_losses import VAE, Contrastive
from lightning_hotcompile.bench.small_models import (
    GAN,
    BatchNormCNN,
    ElementwiseChain,
    GatedBlock,
    LSTMTagger,
    NormBlock,
    Supervised,
    TextMixer,
)
from lightning_hotcompile.bench.varied_models import (
    DilatedConvs,
    Forecaster,
    GatedRecurrence,
    MixerBlock,
    PatchTransformer,
    ResidualConvs,
    SeparableConvs,
    Sines,
    Tabular,
    UNet,
)

Batch = tuple[Tensor, Tensor]
DIFFERENT_BATCHES = 16
"""Batches come in this cycle, so each step does the work of the step so many before it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload: ``make_model()`` and ``make_batch(generator)`` for one batch after the other.

    ``wait_s`` is how long the data takes to arrive before each batch.
    """

    name: str
    make_model: Callable[[], LightningModule]
    make_batch: Callable[[torch.Generator], Batch]
    wait_s: float = 0.0

    def model(self) -> LightningModule:
        """The model with the same weights each time."""
        torch.manual_seed(0)
        return self.make_model()

    def batches(self) -> Batches:
        """Batches without an end."""
        return Batches(self)


class Batches(IterableDataset[Batch]):
    """A few different batches, over and over."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batches = [case.make_batch(generator) for _ in range(DIFFERENT_BATCHES)]
        self._wait_s = case.wait_s
        self.waited_s = 0.0
        """Seconds for which batches were waited for until now, by the clock."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.cycle(self._batches):
            if self._wait_s:
                start = time.perf_counter()
                time.sleep(self._wait_s)
                self.waited_s += time.perf_counter() - start
            yield batch


def _classes(*shape: int, batch: int = 64) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = torch.randn(batch, *shape, generator=generator)
        return x, torch.randint(0, 10, (batch,), generator=generator)

    return make


def _tokens(batch: int, time: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, vocabulary, (batch, time + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def _tokens_of_any_length(batch: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        time = int(torch.randint(24, 72, (), generator=generator))
        return _tokens(batch, time, vocabulary)(generator)

    return make


def _regression(width: int, batch: int = 64) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = torch.randn(batch, width, generator=generator)
        return x, torch.randn(batch, width, generator=generator)

    return make


def _series_to_next(time: int, inputs: int, batch: int = 32) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        series = torch.randn(batch, time + 1, inputs, generator=generator)
        return series[:, :-1].contiguous(), series[:, -1].contiguous()

    return make


def _categories(columns: int, categories: int, batch: int = 256) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        rows = torch.randint(0, categories, (batch, columns), generator=generator)
        return rows, torch.randint(0, 2, (batch,), generator=generator)

    return make


def _images_to_images(side: int, batch: int = 8) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        images = torch.randn(batch, 1, side, side, generator=generator)
        return images, images.square()

    return make


def _tokens_of_width(tokens: int, width: int, batch: int = 16) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = torch.randn(batch, tokens, width, generator=generator)
        return x, x.roll(1, 1)

    return make


def _field(points: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = 2 * torch.rand(points, 2, generator=generator) - 1
        return x, torch.sin(6 * x).prod(-1, keepdim=True)

    return make


def _char_gpt(width: int) -> Callable[[], LightningModule]:
    return lambda: CharGPT(d_model=width, n_layer=4, n_head=4, block_size=64, total_steps=10_000)


def _mlp() -> LightningModule:
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    return Supervised(net, optimizer="SGD", lr=0.01)


def _norm_stack() -> LightningModule:
    return Supervised(
        nn.Sequential(*[NormBlock(256, 0.1) for _ in range(8)], nn.Linear(256, 256)), loss="mse"
    )


def _stack(inner: Callable[[int], int]) -> Callable[[], LightningModule]:
    return lambda: Supervised(nn.Sequential(*[GatedBlock(64, inner(i)) for i in range(24)]), loss="mse")


CASES = {
    case.name: case
    for case in (
        Case(name="gpt-32", make_model=_char_gpt(32), make_batch=_tokens(16, 64, 256)),
        Case(name="gpt-64", make_model=_char_gpt(64), make_batch=_tokens(16, 64, 256)),
        Case(name="gpt-128", make_model=_char_gpt(128), make_batch=_tokens(16, 64, 256)),
        Case(name="mlp", make_model=_mlp, make_batch=_classes(784)),
        Case(name="norm-stack", make_model=_norm_stack, make_batch=_regression(256)),
        Case(
            name="elementwise",
            make_model=lambda: Supervised(ElementwiseChain(512, 24), loss="mse"),
            make_batch=_regression(512),
        ),
        Case(name="cnn", make_model=lambda: Supervised(BatchNormCNN()), make_batch=_classes(1, 8, 8)),
        Case(name="lstm", make_model=lambda: Supervised(LSTMTagger(64, 64)), make_batch=_tokens(16, 32, 64)),
        Case(name="24-alike", make_model=_stack(lambda i: 64), make_batch=_regression(64)),
        Case(name="24-different", make_model=_stack(lambda i: 32 + 4 * i), make_batch=_regression(64)),
        Case(
            name="text",
            make_model=lambda: Supervised(TextMixer(128, 64, 2)),
            make_batch=_tokens_of_any_length(8, 128),
        ),
        Case(name="data-bound", make_model=_mlp, make_batch=_classes(784), wait_s=0.005),
        Case(name="gan", make_model=GAN, make_batch=_classes(64)),
        Case(
            name="resnet",
            make_model=lambda: Supervised(ResidualConvs(32, 3, 10)),
            make_batch=_classes(3, 16, 16, batch=32),
        ),
        Case(
            name="separable",
            make_model=lambda: Supervised(SeparableConvs(48, 4, 10), optimizer="SGD", lr=0.05),
            make_batch=_classes(3, 32, 32, batch=16),
        ),
        Case(
            name="patches",
            make_model=lambda: Supervised(PatchTransformer(4, 64, 64, 3, 10)),
            make_batch=_classes(3, 32, 32, batch=16),
        ),
        Case(
            name="mixer",
            make_model=lambda: Supervised(nn.Sequential(*[MixerBlock(32, 64) for _ in range(4)]), loss="mse"),
            make_batch=_tokens_of_width(32, 64),
        ),
        Case(
            name="gru",
            make_model=lambda: Supervised(Forecaster(8, 64), loss="mse"),
            make_batch=_series_to_next(48, 8),
        ),
        Case(
            name="recurrence",
            make_model=lambda: Supervised(GatedRecurrence(16, 64, 10)),
            make_batch=_classes(24, 16, batch=32),
        ),
        Case(
            name="dilated",
            make_model=lambda: Supervised(DilatedConvs(4, 32, 5, 10)),
            make_batch=_classes(4, 128, batch=32),
        ),
        Case(
            name="tabular",
            make_model=lambda: Supervised(Tabular(12, 100, 16, 2)),
            make_batch=_categories(12, 100),
        ),
        Case(
            name="unet",
            make_model=lambda: Supervised(UNet(12), loss="mse"),
            make_batch=_images_to_images(32),
        ),
        Case(name="sines", make_model=lambda: Supervised(Sines(128, 4), loss="mse"), make_batch=_field(1024)),
        Case(name="vae", make_model=VAE, make_batch=_classes(784, batch=128)),
        Case(name="contrastive", make_model=Contrastive, make_batch=_regression(128, batch=128)),
        Case(
            name="wide",
            make_model=lambda: Supervised(
                nn.Sequential(*[nn.Sequential(nn.Linear(768, 768), nn.ReLU()) for _ in range(3)]),
                loss="mse",
                optimizer="SGD",
                lr=0.01,
            ),
            make_batch=_regression(768, batch=128),
        ),
    )
}
"""All cases, by name."""
