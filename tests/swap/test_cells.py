"""What a step makes for itself, and what functions in it read (cells), has no name in Dynamo's guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


def times(n: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * n


doubled = times(torch.tensor(2.0))


class SetsACellAfterABreak(Net):
    """The code after the break is given the cell, and sets it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        scale = z.detach().abs().mean()

        def scaled(t: Tensor) -> Tensor:
            return t * scale

        torch._dynamo.graph_break()
        z = scaled(doubled(z))
        scale = scale + 1
        return F.cross_entropy(scaled(z), y)


class Scale:
    """An object of the user's."""

    def __init__(self, by: Tensor) -> None:
        self.by, self.uses, self.seen = by, 0, [by]

    def __call__(self, x: Tensor) -> Tensor:
        self.uses += 1
        self.seen.append(x)
        return x * self.by * self.uses


class MakesAnObject(Net):
    """It is made before the break, and used on both sides; the module has an attribute of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        scale = Scale(z.detach().abs().mean())
        z = scale(z) * self.uses
        torch._dynamo.graph_break()
        z = scale(z)
        return F.cross_entropy(z + len(scale.seen), y)


@pytest.mark.parametrize("model_class", [SetsACellAfterABreak, MakesAnObject])
def test_what_has_no_name_is_compiled_and_as_without_the_callback(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
