"""Gradients that go to what is equal to the largest element: forward and backward see the same elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor.lowering import lowerings
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor import equal_elements
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.equal_elements import KeepsElements
from tests.hot import assert_compiled_as_eager
from tests.models import Net

CAPABILITY = torch.backends.cpu.get_cpu_capability()
AMAX = torch.ops.aten.amax.default
PARTITION = "min_cut_rematerialization_partition"


def pairs(x: Tensor) -> Tensor:
    return torch.sigmoid(x[:, None] - x[None])


def columns(x: Tensor) -> Tensor:
    """Of a tensor whose rows lie apart in memory."""
    return torch.tanh(x.t().contiguous().t() * 3)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest of a row": lambda x: columns(x).amax(1),
    "least of pairs": lambda x: pairs(x).amin(1).square(),
    "largest of pairs, in a view": lambda x: pairs(x).flatten(1).amax(1, keepdim=True).square(),
    "largest of all": lambda x: columns(x).max() * x.sum(),
    "least of all": lambda x: columns(x).min() * x.sum(),
    "largest of a row, in a checkpoint": lambda x: checkpoint(
        lambda x: columns(x).amax(1).square(), x, use_reentrant=False
    ),
    "norm": lambda x: torch.linalg.vector_norm(columns(x), float("inf"), 1).square(),
}


def gradient(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, 3 if rows == 12 else 5, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0]


def ours(function: Callable[..., Tensor], *, in_cpp: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend=resolve_backend("inductor", None, {"cpp_wrapper": in_cpp}))


@pytest.mark.slow
@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_it_is_that_of_eager(pool: str, in_cpp: bool) -> None:
    for rows in (12, 24):
        with KeepsElements(), torch.compiler.config.patch(force_disable_caches=True):
            found = gradient(ours(POOLS[pool], in_cpp=in_cpp), rows)
        torch.testing.assert_close(found, gradient(POOLS[pool], rows), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(TORCH != (2, 13) or CAPABILITY != "AVX512", reason="where it was seen")
def test_torch_by_itself_finds_none_that_is_equal() -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        found = gradient(ours(POOLS["largest of a row"], in_cpp=False), 24)
    assert found.isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("is_compared", [True, False])
def test_only_what_is_compared_is_kept(is_compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax has a largest element too, which no gradient goes to."""
    kept: list[Node] = []
    prior = equal_elements._compared

    def seen(graph: Any) -> list[Node]:
        kept.extend(found := list(prior(graph)))
        return found

    monkeypatch.setattr(equal_elements, "_compared", seen)
    pool = columns if is_compared else lambda x: columns(x).softmax(1)
    last = (lambda x: pool(x).amax(1)) if is_compared else (lambda x: pool(x).square())
    with KeepsElements(), torch.compiler.config.patch(force_disable_caches=True):
        gradient(ours(last, in_cpp=False), 24)
    assert [str(node.target) for node in kept] == (["aten.tanh.default"] if is_compared else [])


def test_torch_has_its_own_way_back() -> None:
    before = getattr(compile_fx, PARTITION), lowerings[AMAX]
    with KeepsElements():
        with KeepsElements():
            assert getattr(compile_fx, PARTITION) is not before[0]
        assert lowerings[AMAX] is not before[1]
    assert (getattr(compile_fx, PARTITION), lowerings[AMAX]) == before


def test_nothing_happens_where_torch_divides_graphs_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compile_fx, PARTITION)
    before = lowerings[AMAX]
    with KeepsElements():
        assert lowerings[AMAX] is before


class Pooled(Net):
    """The loss looks at the largest of some bounded numbers."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp, self.out = nn.Linear(8, 12 * 5), nn.Linear(5, 16)

    def forward(self, x: Any) -> Any:
        numbers = self.inp(x).view(-1, 12, 5).transpose(1, 2).contiguous().transpose(1, 2)
        return self.head(self.out(torch.tanh(numbers * 3).amax(1)))


@pytest.mark.slow
def test_a_training_is_that_of_eager() -> None:
    assert_compiled_as_eager(Pooled)
