"""``torch.where`` with a mask of bytes is compiled; without the override Dynamo leaves the step to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hot import STEP, assert_compiled_as_eager, assert_proven, hot
from tests.models import Small, fit, seeded

pytestmark = pytest.mark.filterwarnings("ignore:where received a uint8 condition")


class Masked(Small):
    """The mask of what was measured is an array of bytes, in which 2 is as true as 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.tensor([0, 1, 2, 255], dtype=torch.uint8).repeat_interleave(2))

    def choose(self, x: Tensor) -> Tensor:
        return torch.where(self.mask[:, None], x, x.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.choose(self.inp(batch[0])).square().mean()


class ByMethod(Masked):
    def choose(self, x: Tensor) -> Tensor:
        return x.where(self.mask[:, None], -x)


class ByKeyword(Masked):
    def choose(self, x: Tensor) -> Tensor:
        return torch.where(condition=self.mask[:, None], input=x, other=-x)


class MadeInTheStep(Masked):
    def choose(self, x: Tensor) -> Tensor:
        return torch.where((x.detach() * 3).clamp(0, 2).to(torch.uint8), x, 0.5)


@pytest.mark.parametrize("model_class", [Masked, ByMethod, ByKeyword, MadeInTheStep])
def test_a_mask_of_bytes_chooses_as_in_eager(model_class: type[Masked]) -> None:
    assert_compiled_as_eager(model_class)


def test_it_is_one_graph() -> None:
    callback = hot(fullgraph=True, **STEP)
    fit(seeded(Masked), [callback])
    assert_proven(callback.report)
