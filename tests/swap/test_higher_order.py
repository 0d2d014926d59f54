"""``torch.cond`` and its like, where one of their functions breaks the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import UncapturedHigherOrderOpError

from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

pytestmark = pytest.mark.filterwarnings("ignore:Pred is a Python constant")


def breaks(x: Tensor) -> Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x.tanh()


def goes_on(x: Tensor) -> Tensor:
    return x.sin()


def goes_back(x: Tensor) -> Tensor:
    return x.cos()


class Chooses(Net):
    """The operation comes after a graph break: the part before it has run when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.bends, self.steps = True, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.inp(x).relu()
        self.count(batch_idx)
        x = self.choose(x + 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)

    @torch.compiler.disable
    def count(self, batch_idx: int) -> None:
        self.steps.append(batch_idx)

    def choose(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(self.bends, breaks, goes_on, (x,))
        return chosen


class First(Chooses):
    """There is no graph break before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.choose(self.inp(x))), y)
        self.count(batch_idx)
        return loss


class Captured(Chooses):
    """It can be a part of a graph."""

    def choose(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, goes_back, goes_on, (x,))
        return chosen


class Inside(nn.Module):
    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(16, 16), count

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.count(-1)
        chosen: Tensor = torch.cond(True, breaks, goes_on, (x,))
        return chosen


class InAModule(Chooses):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside(self.count)

    def choose(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.inside(x)
        return chosen


@pytest.mark.parametrize("scope", ["step", "module"])
@pytest.mark.parametrize("model_class", [Chooses, First, Captured, InAModule])
def test_all_code_of_a_step_runs_once(model_class: type[Chooses], scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert model.steps == plain.steps
    assert_same(plain, model)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason


def test_it_is_told_as_a_graph_break() -> None:
    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(Chooses), [callback])
    told = " ".join(callback.report.to_text().split())
    assert "in choose (chosen: Tensor = torch.cond(self.bends, breaks, goes_on, (x,)))" in told
    assert "a function that breaks the graph, in an operation on functions" in told


def test_what_others_compile_is_as_without_the_callback() -> None:
    compiled = torch.compile(lambda x: torch.cond(True, breaks, goes_on, (x,)), backend="eager")
    with pytest.raises(UncapturedHigherOrderOpError), compiling_allowed(suppress_errors=True):
        compiled(torch.ones(2))
