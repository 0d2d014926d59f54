"""Lists of whole numbers that a step makes by ``torch.arange``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


class Dimensions(Net):
    """As losses of MONAI and norms of asteroid say over which dimensions they go."""

    def numbers(self, x: Tensor) -> list[int]:
        return torch.arange(1, x.dim()).tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        spread = self.inp(x).unsqueeze(1).square().mean(dim=self.numbers(x))
        return self.loss(batch) + 0.1 * spread.sum()


class Backwards(Dimensions):
    def numbers(self, x: Tensor) -> list[int]:
        return torch.arange(x.dim() - 1, 0, -1).tolist()


class Changed(Dimensions):
    """The list is of what the tensor holds by then."""

    def numbers(self, x: Tensor) -> list[int]:
        dimensions = torch.arange(1, x.dim())
        dimensions.add_(1)
        return dimensions.tolist()


class ChangedThroughView(Dimensions):
    def numbers(self, x: Tensor) -> list[int]:
        dimensions = torch.arange(1, x.dim())
        dimensions[:1] += 1
        return dimensions.tolist()


class OfFloats(Dimensions):
    def numbers(self, x: Tensor) -> list[int]:
        return [int(each) for each in torch.arange(1.0, x.dim()).tolist()]


class OfSmallNumbers(Dimensions):
    def numbers(self, x: Tensor) -> list[int]:
        return torch.arange(1, x.dim(), dtype=torch.int8).tolist()


class Long(Dimensions):
    def numbers(self, x: Tensor) -> list[int]:
        return torch.arange(1, 100).tolist()[: x.dim() - 1]


@pytest.mark.parametrize(
    "model_class", [Dimensions, Backwards, Changed, ChangedThroughView, OfFloats, OfSmallNumbers, Long]
)
def test_a_step_has_the_numbers_that_eager_has(model_class: type[Net]) -> None:
    callback = hot(scope="step", compile_optimizer=False)
    plain, model = seeded(model_class), seeded(model_class)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)
    assert_proven(callback.report)


@pytest.mark.parametrize("model_class", [Dimensions, Backwards])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_they_end_no_graph(model_class: type[Net], backend: str) -> None:
    callback = hot(scope="step", backend=backend, compile_optimizer=False, fullgraph=True)
    plain, model = seeded(model_class), seeded(model_class)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
    assert callback.report.graph_breaks == 0
