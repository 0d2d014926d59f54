"""Weights whose data the step replaces, as where embeddings are kept at length one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


def normalized(weight: nn.Parameter) -> None:
    weight.data = F.normalize(weight.data, dim=1)


def without_gradients(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.data = F.normalize(weight, dim=1)


def in_place(weight: nn.Parameter) -> None:
    weight.data.copy_(F.normalize(weight.data, dim=1))


def clamped(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


class Embedded(Small):
    """It replaces the data of its first weights in each step."""

    replace: Callable[[nn.Parameter], None]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        weights = list(self.parameters())
        self.replace(weights[0])
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * weights[0].sum()


@pytest.mark.parametrize("replace", [normalized, without_gradients, in_place, clamped])
def test_gradients_are_compared_wherever_they_go(replace: Callable[[nn.Parameter], None]) -> None:
    kind = type("Replacing", (Embedded,), {"replace": staticmethod(replace)})
    plain, model = seeded(kind), seeded(kind)
    fit(plain)
    callback = hot(**STEP)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
