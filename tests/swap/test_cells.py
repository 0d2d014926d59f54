"""Variables of a step that a function within it reads are cells, which have no name in Dynamo's guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def test_a_variable_that_a_function_reads_is_set_after_a_break() -> None:
    plain, model = seeded(SetsACellAfterABreak), seeded(SetsACellAfterABreak)
    callback = hot(scope="step")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
