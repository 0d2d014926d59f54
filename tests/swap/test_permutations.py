"""A step that shuffles its batch is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.permutations import plain_permutations
from tests.hot import assert_compiled_as_eager
from tests.models import Net

pytestmark = pytest.mark.slow


def mixed(x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return 0.3 * x + 0.7 * x[order]


def some(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))[:3]] * 2


def added(x: Tensor) -> Tensor:
    return torch.index_add(x, 0, torch.randperm(len(x))[:2], x[:2] * 3)


def in_ints(x: Tensor) -> Tensor:
    return x.index_select(0, torch.randperm(len(x), dtype=torch.int32, device="cpu")) * 2


def twice(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))] + 2 * x[torch.randperm(len(x))]


@pytest.mark.parametrize("function", [mixed, some, added, in_ints, twice])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_and_gradients_are_those_of_eager(function: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    results = []
    for run in (function, torch.compile(function, backend=inductor(), dynamic=dynamic, fullgraph=True)):
        torch.manual_seed(3)
        x = torch.randn(8, 4, requires_grad=True)
        y = run(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, gradient, torch.rand(1)))
    torch.testing.assert_close(results[1], results[0])


def test_a_default_device_is_kept() -> None:
    with torch.device("meta"):
        graph = torch.fx.symbolic_trace(lambda n: torch.randperm(n))
        plain_permutations(graph)
        assert graph(4).device.type == "meta"


def inductor(random: str = "eager") -> Any:
    return resolve_backend("inductor", None, None, random)


def test_with_random_numbers_of_the_backend_it_is_a_permutation_too() -> None:
    x = torch.arange(64.0)
    found = torch.compile(lambda x: x[torch.randperm(len(x))] + 1, backend=inductor("backend"))(x)
    assert not torch.equal(found, x + 1)
    assert torch.equal(found.sort().values, x + 1)


class Mixup(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        order = torch.randperm(len(x))
        predicted = self(0.8 * x + 0.2 * x[order])
        return 0.8 * F.cross_entropy(predicted, y) + 0.2 * F.cross_entropy(predicted, y[order])


def test_mixup_is_compiled_and_trains_as_eager() -> None:
    assert_compiled_as_eager(Mixup)


@pytest.mark.xfail(
    raises=torch._dynamo.exc.BackendCompilerFailed if TORCH == (2, 13) else Exception,
    strict=TORCH == (2, 13),
    reason="torch's own rewrite of x[randperm] raises",
)
def test_torch_compiles_it_by_itself() -> None:
    """Where this passes, :mod:`~lightning_hotcompile.swap.inductor.permutations` may go."""
    torch.compile(mixed)(torch.randn(8, 4))
