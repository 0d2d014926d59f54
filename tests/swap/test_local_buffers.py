"""Loops of Inductor's that take several rows at a time keep each row of what they leave for the next loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch.nn import functional as F

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.local_buffers import KeepsRowsApart
from tests.hot import assert_compiled_as_eager
from tests.models import Net

CAPABILITY = torch.backends.cpu.get_cpu_capability()
CHECK = "check_outer_fusion_loop_level_attr"


def knots(x: Tensor) -> Tensor:
    """Of a spline, as normalising flows make them."""
    heights = x.split([8, 8, 7], -1)[1]
    heights = heights / (1 + abs(2 * heights / -6.9))
    return 5.0 * (2 * F.pad(heights.softmax(-1), (1, 0)).cumsum(-1) - 1)


def gradients(compiled: Callable[..., Tensor]) -> Tensor:
    x = torch.linspace(-2, 2, 12 * 23).view(4, 3, 23).mul(9).cos().requires_grad_()
    compiled(x).pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def ours(function: Callable[..., Tensor], *, in_cpp: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend=resolve_backend("inductor", None, {"cpp_wrapper": in_cpp}))


@pytest.mark.slow
@pytest.mark.parametrize("in_cpp", [True, False])
def test_each_row_has_its_own_gradient(in_cpp: bool) -> None:
    with KeepsRowsApart(), torch.compiler.config.patch(force_disable_caches=True):
        found = gradients(ours(knots, in_cpp=in_cpp))
    torch.testing.assert_close(found, gradients(knots), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(TORCH != (2, 13) or CAPABILITY != "AVX512", reason="where it was seen")
def test_torch_by_itself_mixes_them_up() -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        found = gradients(ours(knots, in_cpp=False))
    assert not torch.allclose(found, gradients(knots), rtol=0.1, atol=0.1)


def test_torch_has_its_own_way_back() -> None:
    before = vars(OuterLoopFusedSchedulerNode)[CHECK]
    with KeepsRowsApart():
        with KeepsRowsApart():
            assert vars(OuterLoopFusedSchedulerNode)[CHECK] is not before
        assert vars(OuterLoopFusedSchedulerNode)[CHECK] is not before
    assert vars(OuterLoopFusedSchedulerNode)[CHECK] is before


def test_nothing_happens_where_torch_does_it_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OuterLoopFusedSchedulerNode, CHECK)
    with KeepsRowsApart():
        assert CHECK not in vars(OuterLoopFusedSchedulerNode)


class Splines(Net):
    """The loss looks at the knots of a spline for each row."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp, self.out = nn.Linear(8, 23), nn.Linear(9, 16)

    def forward(self, x: Any) -> Any:
        return self.head(self.out(knots(self.inp(x)).pow(2)))


@pytest.mark.slow
def test_a_training_is_that_of_eager() -> None:
    assert_compiled_as_eager(Splines)
