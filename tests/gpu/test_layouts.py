"""Images that lie channels last, as is usual on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

LAST = torch.channels_last


class Images(Net):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(3)
        )
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.point = nn.Conv2d(16, 16, 1)

    def on_fit_start(self) -> None:
        self.to(memory_format=LAST)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x.contiguous(memory_format=LAST))
        for block in self.body:
            x = block(x) + x
        return self.head(self.point(self.depthwise(x)).mean((2, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def images() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, 16, 16, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (96,), generator=generator)), 8)


@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32-true", 1e-2), ("bf16-mixed", 5e-2)], ids=["32 bit", "mixed"]
)
def test_a_training_is_the_one_without(scope: str, precision: Any, tolerance: float) -> None:
    plain, model = seeded(Images), seeded(Images)
    callback = hot(backend="inductor", scope=scope, compile_optimizer=True)
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision}
    fit(plain, train=images(), **options)
    fit(model, [callback], train=images(), **options)
    assert_proven(callback.report)
    weight = model.stem.weight
    assert weight.is_contiguous(memory_format=LAST)
    assert_same(plain, model, tolerance=tolerance)
