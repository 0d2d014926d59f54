"""A GPU that is nearly full: what is ours goes without, and the training goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

WIDTH, ROWS = 1024, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return F.gelu(self.linear(h)) + h.sigmoid()


class Wide(Net):
    """A step holds far more than its inputs: 64 values of this width for each row of a batch of 8."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.wide = nn.ModuleList(Layer() for _ in range(4))
        self.out = nn.Linear(WIDTH, 16)
        self.first = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.first(self.inp(x))[:, None, None].expand(-1, ROWS, 16, -1)
        for layer in self.wide:
            h = layer(h)
        return self.head(self.out(h.mean((1, 2))))


def peak_of(model: Net, *callbacks: Any, **options: Any) -> int:
    """Most bytes that the allocator had of the device in a training."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit(model, list(callbacks), train=loader(96, 8), accelerator="gpu", **options)
    return torch.cuda.max_memory_reserved()


@pytest.fixture
def all_of_it_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("all_of_it_afterwards")
@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize("spare", [1.25, 2.0])
def test_where_a_comparison_does_not_fit_the_training_goes_on(spare: float, scope: str) -> None:
    plain, model = seeded(Wide), seeded(Wide)
    needed = peak_of(plain)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, spare * needed / total))
    callback = hot(backend="inductor", scope=scope, compile_optimizer=True, on_error="eager")
    peak_of(model, callback)
    report = callback.report
    assert report.phase in ("steady", "reverted"), report.reason
    assert "NOT right" not in report.parity, report.parity
    assert_same(plain, model, tolerance=1e-2)


def test_nothing_of_a_comparison_stays_on_the_device() -> None:
    """After its training a model holds what it held without the callback."""
    held = []
    for callbacks in ([], [hot(backend="inductor", scope="step", compile_optimizer=True)]):
        model = seeded(Wide)
        peak_of(model, *callbacks)
        torch._dynamo.reset()
        gc.collect()  # Trainer and model hold each other, with the callback or without
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        del model
    assert held[1] <= held[0] + (16 << 20), held


def test_the_receipt_has_the_peaks() -> None:
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(seeded(Wide), [callback], accelerator="gpu")
    peaks = callback.report.peak_memory_mb
    assert 0 < peaks["until_flip"] <= peaks["whole_run"]
