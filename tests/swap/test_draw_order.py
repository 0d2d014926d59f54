"""Operations that draw random numbers keep their order in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor import ir

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.draw_order import DrawsInOrder
from lightning_hotcompile.swap.inductor.dropout_masks import DropoutMasks
from lightning_hotcompile.swap.replaced import Replacement
from tests.hot import assert_compiled_as_eager, assert_same, hot
from tests.models import Net, fit, seeded


class NoiseBetween(Net):
    """Between two passes with dropout a noise of which nothing is used."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1))  # type: ignore[assignment]
        self.head = nn.Linear(64, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.loss(batch)
        x, y = batch
        _ = first + first.exp() * torch.zeros(len(x), 1).normal_()
        return first + self.loss((1.1 * x, y))


@pytest.mark.slow
def test_a_training_draws_as_eager() -> None:
    assert_compiled_as_eager(NoiseBetween)


@pytest.mark.slow
def test_without_it_the_comparison_finds_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (DrawsInOrder, DropoutMasks):  # with torch's own dropout the order was seen to be another one
        monkeypatch.setattr(way, "replacement", Replacement(lambda: None))
    plain, model = seeded(NoiseBetween), seeded(NoiseBetween)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(plain)
    with torch.compiler.config.patch(force_disable_caches=True):
        fit(model, [callback])
    assert_same(plain, model)
    if TORCH == (2, 13):  # where it was seen
        assert "with the same random numbers" in callback.report.to_text()


DRAWS: list[Callable[[], Tensor]] = [
    lambda: torch.zeros(64, 64).normal_(),
    lambda: torch.rand(64, 64),
    lambda: torch.randint(0, 9, (64, 64)),
    lambda: torch.bernoulli(torch.full((64, 64), 0.3)),
    lambda: torch.zeros(64, 64).bernoulli_(0.3),
    lambda: torch.randperm(64),
]


def between(draws: list[Callable[[], Tensor]]) -> Callable[[Tensor], Tensor]:
    """Each draw comes between two dropouts of its own: their losses, which differ in their inputs."""

    def step(x: Tensor) -> Tensor:
        losses = []
        for i, draw in enumerate(draws):
            first = torch.nn.functional.dropout((x - 0.1 * i).relu(), 0.5) @ x
            _ = first.exp() * draw()
            second = torch.nn.functional.dropout((1.1 * x - 0.1 * i).relu(), 0.3) @ x
            losses.append((first + second).square().mean())
        return torch.stack(losses)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("draws", [DRAWS[:3], DRAWS[3:]], ids=["filled and made", "bernoulli and randperm"])
def test_each_gets_its_own_numbers(draws: list[Callable[[], Tensor]]) -> None:
    results = []
    step = between(draws)
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
    with DrawsInOrder():
        for run in (step, torch.compile(step, backend=resolve_backend("inductor", None, None))):
            torch.manual_seed(5)
            loss = run(x)  # one for each draw
            results.append((loss, torch.rand(1), *torch.autograd.grad(loss.sum(), x)))
    torch.testing.assert_close(results[1], results[0])


def test_the_constructor_is_put_back() -> None:
    before = ir.FallbackKernel.__init__
    with DrawsInOrder(), DrawsInOrder():
        assert ir.FallbackKernel.__init__ is not before
    assert ir.FallbackKernel.__init__ is before


def test_nothing_happens_where_torch_makes_them_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, kernel: Any) -> None:
        pass

    monkeypatch.setattr(ir.FallbackKernel, "__init__", other)
    with DrawsInOrder():
        assert ir.FallbackKernel.__init__ is other
