"""Loops that Inductor writes anew come after the operations that change what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor.scheduler import SchedulerNode
from torch.nn import functional as F

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.kept_dependencies import KeepsDependencies
from tests.hot import assert_compiled_as_eager
from tests.models import Net

INDEX = torch.arange(16 * 64).view(16, 64) * 7 % 64
SOURCE = torch.linspace(0, 1, 16 * 64).view(16, 64)


def greatest(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(1, INDEX, SOURCE, "amax")


def mean(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(1, INDEX, SOURCE, "mean")


def put(x: Tensor) -> Tensor:
    return torch.ones_like(x).index_put((INDEX[0] % 16,), SOURCE[0], accumulate=True)


def kept(x: Tensor) -> Tensor:
    return torch.ones_like(x).bernoulli_(0.5)


def gated(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    norm = nn.LayerNorm(64)
    return lambda x: F.gelu(norm(x)) * gate(x) * 2


def results(step: Callable[[Tensor], Tensor], *, in_cpp: bool) -> list[Tensor]:
    torch._dynamo.reset()
    backend = resolve_backend("inductor", None, {"cpp_wrapper": in_cpp})
    found = []
    with torch.compiler.config.patch(force_disable_caches=True):
        for run in (step, torch.compile(step, backend=backend)):
            torch.manual_seed(1)
            found.append(run(torch.linspace(-2, 2, 16 * 64).view(16, 64).cos()).detach())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "in_cpp"), [(greatest, True), (greatest, False), (mean, True), (put, True), (kept, False)]
)
def test_what_is_changed_is_read_after_the_change(gate: Callable[[Tensor], Tensor], in_cpp: bool) -> None:
    with KeepsDependencies():
        eager, ours = results(gated(gate), in_cpp=in_cpp)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(TORCH != (2, 13), reason="where it was seen")
def test_torch_by_itself_reads_it_before() -> None:
    eager, theirs = results(gated(greatest), in_cpp=False)
    assert not torch.allclose(theirs, eager, rtol=0.1, atol=0.1)


def test_torch_has_its_own_way_back() -> None:
    before = vars(SchedulerNode)["recompute_size_and_body"]
    with KeepsDependencies():
        with KeepsDependencies():
            assert vars(SchedulerNode)["recompute_size_and_body"] is not before
        assert vars(SchedulerNode)["recompute_size_and_body"] is not before
    assert vars(SchedulerNode)["recompute_size_and_body"] is before


def test_nothing_happens_where_torch_does_it_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SchedulerNode, "refresh_dependencies")
    before = vars(SchedulerNode)["recompute_size_and_body"]
    with KeepsDependencies():
        assert vars(SchedulerNode)["recompute_size_and_body"] is before


class Gated(Net):
    """A layer norm and a GELU, times what was scattered."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp = nn.Linear(8, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        gate = torch.zeros(len(x), 64).scatter_reduce(1, INDEX[: len(x)], SOURCE[: len(x)], "amax")
        with torch.no_grad():
            fixed = F.gelu(self.norm(self.inp(x))) * gate
        return self.head(self.out(fixed + self.inp(x)))


@pytest.mark.slow
def test_a_training_is_that_of_eager() -> None:
    assert_compiled_as_eager(Gated)
