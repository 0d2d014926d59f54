"""What a checkpoint repeats runs by the code that ran in its forward, also where other code fits by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from tests.conftest import TOLD_OF_MODES
from tests.hot import assert_same, hot
from tests.models import Batches, Block, fit, seeded
from tests.swap.test_repeated_runs import Each, OneForAll, Selective, SelectiveForAll, trained

KINDS = [Each, OneForAll, Selective, SelectiveForAll]


class Weighted(Block):
    """With a number of its own, as the rate of a drop path is."""

    weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * self.weight


class Renamed(Block):
    """Another constant of the code in each call."""

    name = ""

    def forward(self, x: Tensor) -> Tensor:
        self.name = f"{self.name}."
        y: Tensor = super().forward(x)
        return y * 0.9 if self.name else y


class WeightedAfterABreak(Weighted):
    """The number is in what comes after a branch on data."""

    def forward(self, x: Tensor) -> Tensor:
        y = Block.forward(self, x)
        if y.sum() > 1e9:
            y = y * 2
        return torch.tanh(self.up(y * self.weight))[:, :16] + x


class BreaksOnData(WeightedAfterABreak):
    @property
    def weight(self) -> float:
        return 0.5

    @weight.setter
    def weight(self, value: float) -> None:
        """The same for all."""


class WeightedInAFunction(Weighted):
    """It is in a function that is compiled by itself: the block does not capture."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.after(Block.forward(self, x)) + x

    def after(self, y: Tensor) -> Tensor:
        z = torch.tanh(self.up(y * self.weight))
        torch._dynamo.graph_break()
        return z[:, :16]


def of_blocks(kind: type[Each], block: type[Block], n: int) -> type[Each]:
    class OfBlocks(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block(16, dropout=0.3) for _ in range(n))
            for i, each in enumerate(self.blocks):
                each.weight = 1 - i / 20

    return OfBlocks


@pytest.mark.parametrize("scope", ["regions", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_differ_in_a_number(kind: type[Each], scope: str) -> None:
    """The first one has code for its number alone; the second one has code for any, which then fits both."""
    model = of_blocks(kind, Weighted, 4)
    callback = hot(scope=scope, compile_optimizer=False)
    assert_same(trained(model, []), trained(model, [callback]))
    assert all(region.proven for region in callback.report.regions)


@pytest.mark.parametrize("block", [WeightedAfterABreak, WeightedInAFunction])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_differ_after_a_graph_break(kind: type[Each], block: type[Block]) -> None:
    """Which code runs there is Dynamo's to find: there is one, or eager goes on."""
    model = of_blocks(kind, block, 4)
    callback = hot(scope="regions", compile_optimizer=False, on_error="eager")
    assert_same(trained(model, []), trained(model, [callback]))
    assert "there would be more than one code" in callback.report.to_text()


@pytest.mark.parametrize("kind", [Each, Selective])
def test_other_sizes_after_a_graph_break_are_compiled(kind: type[Each]) -> None:
    """No backward of the first size is still to come."""
    kind, batches = of_blocks(kind, BreaksOnData, 3), Batches([8] * 8 + [6] * 8)
    callback, plain, model = hot(scope="regions", compile_optimizer=False), seeded(kind), seeded(kind)
    fit(plain, train=batches, max_epochs=2)
    fit(model, [callback], train=batches, max_epochs=2)
    assert_same(plain, model)
    assert all(region.proven for region in callback.report.regions)


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_fits_one_call_only(kind: type[Each]) -> None:
    """At Dynamo's limit nothing more is compiled: in the middle of a forward, or of what is repeated."""
    model = of_blocks(kind, Renamed, 3)
    callback = hot(scope="regions", compile_optimizer=False, on_error="eager")
    assert_same(trained(model, []), trained(model, [callback]))


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_fits_no_call_at_all(kind: type[Each], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two modes were closed in the order in which they were opened, torch knows of one for good."""
    for name in TOLD_OF_MODES:
        monkeypatch.setattr(_python_dispatch, name, True, raising=False)
    options: dict[str, Any] = {"scope": "regions", "compile_optimizer": False, "on_error": "eager"}
    assert_same(trained(kind, []), trained(kind, [hot(**options)]))
