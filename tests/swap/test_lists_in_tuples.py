"""Lists in a tuple that a module has: torch alone appends to a copy, and reads what they held once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


class Collects(Small):
    """What it has seen, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[list[int], list[float]] = ([], [])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen[0].append(batch_idx)
        self.seen[1].insert(0, 0.5)
        return loss


class Reads(Small):
    """A weight that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ([1.0, 2.0], [3])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.seen[0][1] + self.seen[1][0]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 6 == 0:
            self.seen[0][1] *= 0.5


@pytest.mark.parametrize("kind", [Collects, Reads])
def test_they_are_as_without_the_callback(kind: type[Small]) -> None:
    torch.compile(Collects(), backend="eager")(torch.ones(2, 8))  # Dynamo keeps what it has used once
    plain, model = seeded(kind), seeded(kind)
    callback = hot(**STEP)
    fit(plain, max_epochs=2)
    fit(model, [callback], max_epochs=2)
    assert_proven(callback.report)
    assert_same(plain, model)
    assert model.seen == plain.seen


def test_torch_by_itself_appends_to_a_copy() -> None:
    """Where it no longer does this override is not needed."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: tuple[list[int], ...] = ([],)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            self.seen[0].append(1)
            return x

    module = Module()
    torch.compile(module, backend="eager")(torch.ones(2))
    assert module.seen == ([],)
