"""Operations that draw random numbers are as many in compiled code as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import compile_utils

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.draws import DrawsStaySeparate
from lightning_hotcompile.swap.replaced import Replacement
from tests.hot import assert_compiled_as_eager, assert_same, hot
from tests.models import Net, fit, seeded
from tests.swap.step_surroundings_cases import DrawsTwiceAlike

until_2_13 = pytest.mark.skipif(TORCH > (2, 13), reason="torch 2.14 takes each draw for its own")


def dirichlet(x: Tensor) -> Tensor:
    return torch._sample_dirichlet(x.detach().abs() + 0.5)


def uniform(x: Tensor) -> Tensor:
    return torch.empty_like(x).uniform_()


DRAWS: list[Callable[[Tensor], Tensor]] = [torch.randn_like, torch.rand_like, dirichlet, uniform]


def trained(function: Callable[..., Any], x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    loss, difference = function(x)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return [loss.detach(), difference, gradient, torch.rand(1)]


def compiled(draws: list[Callable[[Tensor], Tensor]], backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """What two draws alike give in eager, and compiled: of each kind, all in one graph."""

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [(draw(x), draw(x)) for draw in draws]
        losses = [(one * other * x.sin()).sum() for one, other in pairs]
        return torch.stack(losses), torch.stack([(one - other).abs().sum().detach() for one, other in pairs])

    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 64).requires_grad_()
    code = torch.compile(twice, backend=resolve_backend(backend, None, None))
    return trained(twice, x), trained(code, x)


@pytest.mark.parametrize(
    ("draws", "backend"),
    [
        *(([draw], "aot_eager") for draw in DRAWS),
        pytest.param(DRAWS, "inductor", marks=pytest.mark.slow),
    ],
    ids=[*(draw.__name__ for draw in DRAWS), "all by Inductor"],
)
def test_two_draws_stay_two(draws: list[Callable[[Tensor], Tensor]], backend: str) -> None:
    with DrawsStaySeparate():
        eager, ours = compiled(draws, backend)
    assert (eager[1] > 0).all()
    torch.testing.assert_close(ours, eager)


@until_2_13
def test_torch_alone_takes_two_for_one() -> None:
    """What all this is for; once torch does otherwise it can go."""
    eager, theirs = compiled([torch.randn_like], "aot_eager")
    assert eager[1] > 0
    assert theirs[1] == 0


class SampleUnused(Net):
    """Of a sampled encoding only the mean is used, and dropout draws after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        encoding = torch.distributions.Normal(self.inp(x), 1.0)
        encoding.rsample()
        return nn.functional.cross_entropy(self.head(nn.functional.dropout(encoding.loc, 0.5)), y)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_drawn_in_vain_is_drawn(backend: str) -> None:
    assert_compiled_as_eager(SampleUnused, backend=backend)


def test_others_draws_count_by_what_they_say_of_themselves() -> None:
    with torch.library._scoped_library("hotcompile_draws", "DEF") as library:
        library.define("drawn(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
        library.define("same(Tensor x) -> Tensor")
        with DrawsStaySeparate():
            assert torch.ops.hotcompile_draws.drawn in compile_utils.rand_ops
            assert torch.ops.hotcompile_draws.same not in compile_utils.rand_ops
            assert torch.ops.aten.add not in compile_utils.rand_ops
            assert "a method" not in compile_utils.rand_ops


def test_the_list_is_put_back() -> None:
    before = compile_utils.rand_ops
    with DrawsStaySeparate(), DrawsStaySeparate():
        assert compile_utils.rand_ops is not before
        assert set(before) <= set(compile_utils.rand_ops)
    assert compile_utils.rand_ops is before


@pytest.mark.parametrize("there", [None, "another kind of list"])
def test_nothing_happens_where_torch_has_no_such_list(monkeypatch: pytest.MonkeyPatch, there: Any) -> None:
    monkeypatch.setattr(compile_utils, "rand_ops", there)
    with DrawsStaySeparate():
        assert compile_utils.rand_ops is there


@until_2_13
def test_where_it_cannot_be_had_such_code_is_found_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawsStaySeparate, "replacement", Replacement(lambda: None))
    callback = hot(scope="step")
    plain, model = seeded(DrawsTwiceAlike), seeded(DrawsTwiceAlike)
    fit(plain, max_epochs=1)
    fit(model, [callback], max_epochs=1)
    assert_same(plain, model)
    assert "as many random numbers" in callback.report.to_text()
