"""``weight.data *= mask`` is compiled; AOTAutograd alone sets no data of what the graph has written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import STEP, assert_compiled_as_eager, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


class Masked(nn.Linear):
    """Sees the features before the last ones only."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class Clamped(Masked):
    """In place, and set to it by hand."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.mul_(self.mask).clamp_(-0.3, 0.3)
        return nn.Linear.forward(self, x)


class Outer(nn.Module):
    """Of a layer that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data *= self.mask
        return self.layer(x)


class Other(Masked):
    """Other memory, and other elements of the same: these are set."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * self.mask
        self.mask.data = self.mask.data.t()
        return nn.Linear.forward(self, x)


class Net(Small):
    """Calls its layer twice."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((self.layer(F.relu(self.layer(x))), y))


@pytest.mark.parametrize("kind", [Masked, Clamped, Outer])
def test_data_that_are_changed_in_place_are_compiled(kind: type[nn.Module]) -> None:
    assert_compiled_as_eager(lambda: Net(kind))


@pytest.mark.parametrize("kind", [Masked, Clamped, Outer])
def test_it_is_one_graph(kind: type[nn.Module]) -> None:
    callback = hot(fullgraph=True, **STEP)
    fit(seeded(lambda: Net(kind)), [callback])
    assert_proven(callback.report)


def test_other_data_are_set() -> None:
    plain, model = (seeded(lambda: Net(Other)) for _ in range(2))
    fit(plain)
    fit(model, [hot(on_error="eager", **STEP)])
    assert_same(plain, model, tolerance=0.0)
    assert plain.layer.mask.stride() == model.layer.mask.stride()
