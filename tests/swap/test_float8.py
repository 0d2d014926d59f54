"""Tensors of 8-bit floats: torch has hardly any operation for them, and they are compared all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hotcompile.swap.graphs.saved_inputs import watch_until_backward
from lightning_hotcompile.swap.parity.clones import Kept
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.tripwire import Tripwire
from lightning_hotcompile.swap.parity.verdict import Parity
from tests.hot import assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=str)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_all_of_them_are_numbers_of_16_bits(kind: torch.dtype) -> None:
    """So that nothing is lost where they are compared as those."""
    every = torch.arange(256, dtype=torch.uint8).view(kind)
    finite = every.float().isfinite()
    assert torch.equal(every.to(torch.bfloat16).float()[finite], every.float()[finite])


@pytest.mark.parametrize("is_input", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_a_graph_that_has_them_is_compared(kind: torch.dtype, is_right: bool, is_input: bool) -> None:
    def eager(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        wide = x.float() * w
        return wide.to(kind), wide.sum()

    def compiled(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        narrow, total = eager(x, w)
        return (narrow if is_right else (narrow.float() * 2).to(kind)), total

    x = numbers(8, 4)
    parity = compare(eager, compiled, [x.to(kind) if is_input else x, torch.ones(4, requires_grad=True)])
    assert parity.agrees is is_right, parity.reason
    assert is_right or "differs from eager" in parity.reason


def test_one_that_is_changed_in_place_is_compared_and_put_back(kind: torch.dtype) -> None:
    def stores(x: Tensor, cache: Tensor) -> tuple[Tensor]:
        cache.copy_(x)
        return (x * 2,)

    def wrong(x: Tensor, cache: Tensor) -> tuple[Tensor]:
        cache.copy_(x * 2)
        return (x * 2,)

    given = [numbers(8), torch.zeros(8).to(kind)]
    assert compare(stores, stores, given).agrees
    assert compare(stores, wrong, given).agrees is False
    kept = Kept(given[1:])
    stores(*given)
    kept.put_back()
    assert not given[1].float().any()


def test_nan_in_them_is_found(kind: torch.dtype) -> None:
    look = Tripwire(lambda x: (x.to(kind),), [], Parity(agrees=True))
    args = [numbers(4)]
    before = look.before(args)
    assert before is not None
    assert not look.finds((args[0].to(kind),), args, before)
    assert look.finds((torch.full((4,), float("nan")).to(kind),), args, before)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_backward_tells_whether_they_are_as_they_were(kind: torch.dtype, is_changed: bool) -> None:
    found: list[frozenset[int]] = []
    x, w = numbers(3).to(kind), torch.ones(3, requires_grad=True)
    y = w * 2
    assert watch_until_backward({0: x}, [y], found.append)
    if is_changed:
        x.data.copy_(torch.ones(3))
    y.sum().backward()
    assert found == [frozenset({0} if is_changed else ())]


class Rounds(Small):
    """What a layer gives on is kept in 8 bits over a graph break."""

    kind: torch.dtype

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.inp(x)
        narrow = (8 * h).to(self.kind)
        torch._dynamo.graph_break()
        h = h + (narrow.float() / 8 - h).detach()
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h), y)


def test_a_training_that_has_them_is_compiled(kind: torch.dtype) -> None:
    trained = type("Rounds", (Rounds,), {"kind": kind})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain)
    fit(model, [callback])
    assert "NOT right" not in callback.report.parity, callback.report.parity
    assert_proven(callback.report)
    assert_same(plain, model)
