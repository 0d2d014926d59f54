"""Reductions that Inductor vectorises: each row has a result, of its own elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor.codegen.cpp import TilingSelect
from torch.nn import functional as F

from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.reduction_tiles import KeepsResultsOfRows
from tests.hot import assert_compiled_as_eager
from tests.models import Net

SELECT = "select_tiling"
BATCH, NODES, WIDTH = 8, 32, 16


def attention(scores: Tensor, values: Tensor, edges: Tensor, heads: int) -> Tensor:
    """Of a graph attention network: each head's weights of all edges of a node.

    Args:
        scores: of shape ``(heads, BATCH * NODES, 2)``, as a matrix product leaves them.
        values: of shape ``(BATCH, NODES, heads, WIDTH)``.
        edges: of shape ``(BATCH, NODES, NODES)``.
        heads: fewer than a vector has elements, or more.
    """
    scores = scores.view(heads, BATCH, NODES, 2).permute(1, 2, 0, 3)
    pairs = scores[..., 0].unsqueeze(2) + scores[..., 1].unsqueeze(1)
    masked = F.leaky_relu(pairs, 0.2).masked_fill(~(edges > 0.5).unsqueeze(-1), -1e9)
    return torch.einsum("bnmh,bmhd->bnhd", masked.softmax(2), values)


def inputs(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    scores = torch.randn(heads, BATCH * NODES, 2, requires_grad=True)
    return scores, torch.randn(BATCH, NODES, heads, WIDTH), torch.randn(BATCH, NODES, NODES)


@pytest.mark.slow
@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("heads", [3, 4, 16, 19])
def test_each_head_has_its_own_weights(heads: int, in_cpp: bool) -> None:
    torch._dynamo.reset()
    given = inputs(heads)
    compiled = torch.compile(attention, backend=resolve_backend("inductor", None, {"cpp_wrapper": in_cpp}))
    with KeepsResultsOfRows(), torch.compiler.config.patch(force_disable_caches=True):
        found = compiled(*given, heads)
        (gradient,) = torch.autograd.grad(found.square().sum(), given[0])
    expected = attention(*given, heads)
    (slope,) = torch.autograd.grad(expected.square().sum(), given[0])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-4)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    """Of values that are all above zero, and of the same below it."""
    below = -x
    rows = x.amin(1), x.argmin(1), below.amax(1), below.argmax(1), x.max(1)[1]
    return *rows, x.amin(0), x.argmin(0), x.min()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("columns", [16, 37])
def test_integers_of_8_bit_are_compared_with_each_other_only(dtype: torch.dtype, columns: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randint(1, 127, (5, columns)).to(dtype)
    compiled = torch.compile(extremes, backend=resolve_backend("inductor", None, None))
    with KeepsResultsOfRows(), torch.compiler.config.patch(force_disable_caches=True):
        found = compiled(x)
    assert all(map(torch.equal, found, extremes(x)))


def test_torch_has_its_own_way_back() -> None:
    before = vars(TilingSelect)[SELECT]
    with KeepsResultsOfRows():
        with KeepsResultsOfRows():
            assert vars(TilingSelect)[SELECT] is not before
        assert vars(TilingSelect)[SELECT] is not before
    assert vars(TilingSelect)[SELECT] is before


def test_nothing_happens_where_torch_does_it_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TilingSelect, SELECT)
    with KeepsResultsOfRows():
        assert SELECT not in vars(TilingSelect)


class GraphAttention(Net):
    """Each row is a small graph with four heads."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp, self.values = nn.Linear(8, NODES * 4 * 2), nn.Linear(8, NODES * 4 * WIDTH)
        self.edges = nn.Linear(8, NODES * NODES)
        self.out = nn.Linear(4 * WIDTH, 16)

    def forward(self, x: Any) -> Any:
        scores = self.inp(x).view(BATCH * NODES, 4, 2).transpose(0, 1).contiguous()
        values = self.values(x).view(BATCH, NODES, 4, WIDTH)
        edges = self.edges(x).view(BATCH, NODES, NODES)
        return self.head(self.out(attention(scores, values, edges, 4).flatten(2)).mean(1))


@pytest.mark.slow
def test_a_training_is_that_of_eager() -> None:
    assert_compiled_as_eager(GraphAttention)
