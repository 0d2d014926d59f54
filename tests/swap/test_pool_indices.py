"""A max pooling whose window is minus infinity all through has its gradient where eager has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.compiler.config
from torch import Tensor
from torch._inductor import lowering
from torch.nn import functional as F

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.pool_indices import KeepsPlaces
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

NAME = "_pool_offsets_to_indices"

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "1d": lambda x: F.max_pool1d(x.flatten(1), 3, 2, 1),
    "2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "2d, wide": lambda x: F.max_pool2d(x, (1, 5), 2, (0, 2)),
    "2d, large": lambda x: F.max_pool2d(x, 7, 3, 3),
    "3d": lambda x: F.max_pool3d(x[None], 3, 2, 1),
    "no padding": lambda x: F.max_pool2d(x, 3, 2),
    "places": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1] + x.sum(),
}


def images() -> Tensor:
    """Four of three channels; one masked all through, one in its upper half, one but for a column."""
    x = torch.linspace(-2, 2, 4 * 3 * 9 * 11).mul(40).sin().view(4, 3, 9, 11)
    x[0], x[1, :, :5], x[2, :, :, 1:] = float("-inf"), float("-inf"), float("-inf")
    return x


def run(pool: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = images().requires_grad_()
    found = pool(x)
    (gradient,) = torch.autograd.grad(found, x, torch.arange(found.numel()).view(found.shape).to(found) + 1)
    return found.detach(), gradient


def compiled(pool: Callable[[Tensor], Tensor], *, in_cpp: bool = True) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(pool, backend=resolve_backend("inductor", None, {"cpp_wrapper": in_cpp}))


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_gradients_go_where_eagers_go(name: str) -> None:
    with KeepsPlaces(), torch.compiler.config.patch(force_disable_caches=True):
        for ours, theirs in zip(run(compiled(POOLS[name])), run(POOLS[name]), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(TORCH != (2, 13), reason="where it was seen")
def test_torch_by_itself_raises() -> None:
    with torch.compiler.config.patch(force_disable_caches=True), pytest.raises(RuntimeError, match="bounds"):
        run(compiled(POOLS["2d"], in_cpp=False))


def test_torch_has_its_own_way_back() -> None:
    before = getattr(lowering, NAME)
    with KeepsPlaces():
        with KeepsPlaces():
            assert getattr(lowering, NAME) is not before
        assert getattr(lowering, NAME) is not before
    assert getattr(lowering, NAME) is before


def test_nothing_happens_where_torch_does_it_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lowering, NAME)
    with KeepsPlaces():
        assert not hasattr(lowering, NAME)


class Masked(Small):
    """Pools sequences; from the seventh batch on one of each batch is masked all through."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[0] = self.is_masked
        pooled = F.max_pool1d((x * self.inp.weight[0]).masked_fill(mask, float("-inf")), 3, 1, 1)
        return super().loss((torch.where(pooled.isinf(), 0.0, pooled), y))

    def on_fit_start(self) -> None:
        self.register_buffer("is_masked", torch.tensor(False), persistent=False)

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.is_masked.fill_(self.global_step > 6)


@pytest.mark.slow
def test_a_training_goes_on_where_a_sequence_is_masked_all_through() -> None:
    plain, model = seeded(Masked), seeded(Masked)
    fit(plain, max_steps=24)
    callback = hot(backend="inductor", **STEP)
    fit(model, [callback], max_steps=24)
    assert_proven(callback.report)
    assert_same(plain, model)
