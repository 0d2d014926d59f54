"""Compiled code draws the numbers of eager's from the GPU's generator, and leaves it in the same state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import assert_proven, assert_same, hot
from tests.matrix.nets import SgdNet
from tests.models import Net, fit, loader, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


class Drops(SgdNet):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class Noise(SgdNet):
    """Two draws that read nothing of each other, one that nobody uses, and one in place."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        first, second = torch.randn_like(x), torch.randn_like(x)
        torch.rand_like(x)
        keep = torch.empty_like(x).bernoulli_(0.8)
        return F.cross_entropy(self(x * keep + 0.1 * first), y) + 0 * (second * first).mean()


class Mixed(SgdNet):
    """From both generators, of the GPU and of the CPU."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        order = torch.randperm(len(x), device=x.device)
        at = torch.rand(8).to(x.device)
        return F.cross_entropy(F.dropout(self(x[order] * at), 0.1, self.training), y[order])


class Attends(SgdNet):
    """Attention with dropout in its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.inp(x).view(len(x), 4, 16).transpose(0, 1)[None]
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.2 if self.training else 0.0)
        x = self.out(h[0].transpose(0, 1).reshape(len(x), 64))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(model: Net, *callbacks: Any, **options: Any) -> list[Tensor]:
    """The states of both generators afterwards."""
    torch.cuda.manual_seed(5)
    fit(model, list(callbacks), train=loader(), accelerator="gpu", **options)
    return [torch.cuda.get_rng_state(), torch.get_rng_state()]


@pytest.mark.parametrize("model_class", [Drops, Noise, Mixed, Attends], ids=lambda c: c.__name__)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_numbers_are_those_of_eager(model_class: type[Net], precision: Any, scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(backend="inductor", scope=scope, compile_optimizer=False)
    expected = trained(plain, precision=precision)
    found = trained(model, callback, precision=precision)
    assert_proven(callback.report)
    assert all(map(torch.equal, expected, found)), "as many numbers as without"
    assert_same(plain, model, tolerance=1e-2 if precision == "32-true" else 5e-2)


@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_comparison_of_random_code_compiles_nothing_twice(scope: str, precision: Any) -> None:
    """Where its numbers are eager's and only rounding differs, there is no need to take them out."""
    callback = hot(backend="inductor", scope=scope, compile_optimizer=False)
    trained(seeded(Drops), callback, precision=precision)
    assert_proven(callback.report)
    assert "own noise" not in callback.report.parity, callback.report.parity


def test_inductors_own_numbers_are_right_too() -> None:
    callback = hot(backend="inductor", scope="step", compile_optimizer=False, random="backend")
    trained(seeded(Drops), callback)
    assert_proven(callback.report)
    assert "NOT right" not in callback.report.parity
