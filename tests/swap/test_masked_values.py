"""``hidden[mask] = self.token`` is compiled; AOTAutograd alone cannot differentiate it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, assert_compiled_as_eager, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


class Token(Small):
    """What stands for hidden rows is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(8))

    def masked(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x[:, 0] > 0] = self.token
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((self.masked(x), y))


class OfHidden(Token):
    """In an activation, at places of the first two of three dimensions."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.inp(x).unflatten(1, (4, 4))
        hidden[x[:, :4] > 0] = self.token[:4]
        return F.cross_entropy(self.head(hidden.flatten(1)), y)


class OneNumber(Token):
    """The same number everywhere."""

    def masked(self, x: Tensor) -> Tensor:
        x = self.token * x
        x[x > 0.5] = self.token[0]
        return x


class OfAColumn(Token):
    """A mask of columns, behind all rows."""

    def masked(self, x: Tensor) -> Tensor:
        x = self.token * x
        x[:, x[0] > 0] = self.token[0]
        return x


class OfEachRow(Token):
    """A value of its own for each place."""

    def masked(self, x: Tensor) -> Tensor:
        x = self.token * x
        chosen = x[:, 0] > 0
        x[chosen] = 2 * x[chosen]
        return x


class OneRow(Token):
    """A value for each place, of which there is one."""

    def masked(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x[:, 0] == x[:, 0].max()] = self.token[None]
        return x


class Constant(Token):
    """Nothing that is trained: this needs no help."""

    def masked(self, x: Tensor) -> Tensor:
        x = self.token * x
        x[x[:, 0] > 0] = torch.ones(8)
        return x


class ByNumber(Token):
    """No mask: a row by its number, which is no sequence, and by two."""

    def masked(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[0] = self.token
        x[1, :4] = 2 * self.token[:4]
        return x


def trained(kind: type[Token], **options: Any) -> Any:
    plain, model = seeded(kind), seeded(kind)
    fit(plain)
    callback = hot(**STEP, **options)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    return callback.report


@pytest.mark.parametrize("kind", [Token, OfHidden, OneNumber, Constant, ByNumber])
def test_one_value_for_all_places_is_in_the_graph(kind: type[Token]) -> None:
    report = trained(kind)
    assert report.graph_breaks == 0
    assert report.regions[0].graphs == 1


@pytest.mark.parametrize("kind", [OfAColumn, OfEachRow, OneRow])
def test_others_break_it_and_the_rest_is_compiled(kind: type[Token]) -> None:
    report = trained(kind)
    assert report.graph_breaks
    assert report.regions[0].graphs >= 2


def test_a_type_that_does_not_fit_is_an_error_as_in_eager() -> None:
    class Half(Token):
        def masked(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[x[:, 0] > 0] = self.token.double() if self.global_step == 20 else self.token
            return x

    with pytest.raises(RuntimeError, match="dtypes match"):
        fit(seeded(Half), [hot(**STEP)])


def test_a_mask_that_does_not_fit_is_an_error_as_in_eager() -> None:
    def set_all(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        x[mask] = value
        return x.sum()

    compiled = CompiledFunction(set_all, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    value = torch.ones(3, requires_grad=True)
    with compiling_allowed(suppress_errors=False):
        assert compiled.compile(torch.zeros(4, 3), torch.ones(4, dtype=torch.bool), value) == 12
        with pytest.raises(
            IndexError, match="shape of the mask"
        ):  # one place would do for all by broadcasting
            compiled.compile(torch.zeros(4, 3), torch.ones(1, dtype=torch.bool), value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Token, OfHidden])
def test_by_inductor(kind: type[Token]) -> None:
    assert_compiled_as_eager(kind)
