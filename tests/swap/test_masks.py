"""What is rounding in code with dropout, whose numbers an accelerator draws, is told by eager's own masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.parity import masks
from lightning_hotcompile.swap.parity.clones import RandomState
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.trial import Trial

ROWS, WIDTH, P = 512, 64, 0.2


@pytest.fixture(autouse=True)
def drawn_by_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a run tells: what is drawn here is not known to come from the CPU's generator."""
    prior = RandomState.is_same
    monkeypatch.setattr(
        RandomState,
        "is_same",
        lambda self, other, *, of_gpus=False: not of_gpus and prior(self, other),
    )


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    w = torch.randn(2, WIDTH, WIDTH, generator=generator) / 8
    return [x.bfloat16(), w.bfloat16().requires_grad_()]


def block(x: Tensor, w: Tensor) -> tuple[Tensor]:
    h = F.dropout(F.gelu(x @ w[0]), P)
    return (x + F.dropout((h @ w[1]).sin(), P),)


def fused(x: Tensor, w: Tensor, wrong: float = 1.0) -> tuple[Tensor]:
    """The same with numbers of 32 bit in between, as a compiler has them; dropouts draw as eager does."""
    h = F.gelu(x.float() @ w[0].float())
    h = h * _kept(x)
    h = (h @ w[1].float()).sin() * wrong
    return ((x.float() + h * _kept(x)).bfloat16(),)


def _kept(x: Tensor) -> Tensor:
    return (F.dropout(torch.ones_like(x), P) != 0) / (1 - P)


def not_asked_for() -> Any:
    pytest.fail("it is compiled once more, without its random numbers")


def test_rounding_is_told_without_a_second_compile() -> None:
    parity = compare(block, fused, inputs(), neutral=not_asked_for, draws_as_eager=True)
    assert parity.agrees, parity.reason
    assert (parity.stochastic, parity.other_numbers) == (True, False)


@pytest.mark.parametrize("wrong", [1.05, 0.9])
def test_what_is_wrong_is_held_against_the_noise_as_before(wrong: float) -> None:
    asked: list[int] = []

    def neutral() -> Any:
        asked.append(1)
        return lambda x, w: (x @ w[0],), lambda x, w: (x @ w[0] * wrong,)

    code: Callable[..., Any] = lambda x, w: fused(x, w, wrong)  # noqa: E731
    assert compare(block, code, inputs(), neutral=neutral, draws_as_eager=True).failed
    assert asked


def test_the_run_in_64_bit_has_the_masks_of_the_first() -> None:
    trial, given = Trial(inputs(), []), inputs()
    first = trial.run(block, 1)
    wide = masks.run_with_masks(trial, block, 1, first)
    assert wide is not None
    assert wide.tensors[0].dtype is torch.float64
    torch.testing.assert_close(wide.tensors[0].float(), first.tensors[0].float(), rtol=0.03, atol=0.03)
    (gradient,) = [g for g in wide.gradients if g is not None]
    assert gradient.shape == given[1].shape


def in_place(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.dropout(x @ w[0], P, inplace=True),)


def of_a_whole_channel(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.dropout1d((x @ w[0])[None], P),)


def with_noise(x: Tensor, w: Tensor) -> tuple[Tensor]:
    h = F.dropout(x @ w[0], P)
    return (h + torch.randn_like(h),)


def repeated(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (checkpoint(lambda x, w: F.dropout(x @ w, P).sin(), x, w[0], use_reentrant=False),)


def other_masks(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """What is asked of an accelerator for ones may be drawn in another order than for the input."""
    return (F.dropout(x @ w[0], P if x.dtype is torch.float64 else 2 * P),)


@pytest.mark.parametrize("function", [in_place, of_a_whole_channel, with_noise, repeated, other_masks])
def test_where_masks_are_not_all_that_is_drawn_there_is_no_such_run(function: Any) -> None:
    trial = Trial(inputs(), [])
    assert masks.run_with_masks(trial, function, 1, trial.run(function, 1)) is None


def test_nor_where_ones_are_given_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that lies otherwise in memory may be drawn for in another order."""
    ones = torch.ones_like

    def after_a_draw(*args: Any, **kwargs: Any) -> Tensor:
        torch.rand(1)
        return ones(*args, **kwargs)

    trial = Trial(inputs(), [])
    first = trial.run(block, 1)
    monkeypatch.setattr(masks.torch, "ones_like", after_a_draw)
    assert masks.run_with_masks(trial, block, 1, first) is None


def test_a_step_that_draws_nothing_has_none() -> None:
    def plain(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (F.dropout(x @ w[0], P, training=False),)

    trial = Trial(inputs(), [])
    assert masks.run_with_masks(trial, plain, 1, trial.run(plain, 1)) is None
