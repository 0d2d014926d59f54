"""Steps that choose, where the last digit decides: compiled code may choose otherwise, and is as right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.parity import uncertain
from lightning_hotcompile.swap.parity.compare import compare

Outputs = tuple[Tensor, ...]


def alike() -> list[Any]:
    """Rows with the same numbers in another order: their sums are the same but for rounding."""
    generator = torch.Generator().manual_seed(22)
    numbers = torch.rand(64, generator=generator)
    rows = torch.stack([numbers[torch.randperm(64, generator=generator)] for _ in range(4)])
    return [rows.requires_grad_(), torch.rand(4, generator=generator).requires_grad_(), torch.zeros(3)]


def one_by_one(rows: Tensor) -> Tensor:
    """The sum of each row, added from the left."""
    total = torch.zeros(len(rows))
    for column in rows.unbind(1):
        total = total + column
    return total


def hardest(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    """Weighs the row whose sum is the largest."""
    chosen = one_by_one(rows).argmax()
    mean.mul_(0.9).add_(0.1)
    return (rows[chosen].square().sum(), other.square())


def other_way_round(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    return hardest(rows.flip(1), other, mean)


def test_the_data_are_such_that_rounding_decides() -> None:
    rows = alike()[0].detach()
    assert one_by_one(rows).argmax() != one_by_one(rows.flip(1)).argmax()
    exact = one_by_one(rows.double())
    assert one_by_one(rows).argmax() == exact.argmax(), "a 64-bit run does not tell"
    torch.testing.assert_close(exact, exact[0].expand(4), rtol=1e-12, atol=0)


def test_another_choice_between_two_that_are_alike_is_no_error() -> None:
    inputs = alike()
    before, state = [t.clone() for t in inputs], torch.get_rng_state()
    parity = compare(hardest, other_way_round, inputs)
    assert parity.agrees
    assert "as near to eager as eager is to itself" in parity.reason
    assert parity.error is not None
    assert parity.error > 0.1
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def wrong_beside_it(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    loss, square = other_way_round(rows, other, mean)
    return loss, square * 1.02


def wrong_by_far(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    loss, square = other_way_round(rows, other, mean)
    return loss * 9, square


def wrong_in_what_it_keeps(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    outputs = other_way_round(rows, other, mean)
    mean.add_(0.01)
    return outputs


def not_finite(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
    loss, square = other_way_round(rows, other, mean)
    return loss / 0, square


@pytest.mark.parametrize("wrong", [wrong_beside_it, wrong_by_far, wrong_in_what_it_keeps, not_finite])
def test_what_is_wrong_is_found_all_the_same(wrong: Callable[..., Outputs]) -> None:
    assert compare(hardest, wrong, alike()).failed


def test_an_index_that_is_the_same_is_close_though_eagers_own_moves() -> None:
    def with_index(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
        return (*hardest(rows, other, mean), one_by_one(rows).argmax())

    def another(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
        return (*other_way_round(rows, other, mean), one_by_one(rows).argmax())

    assert compare(with_index, another, alike()).agrees


def test_an_index_has_no_last_digit() -> None:
    def chosen(rows: Tensor, other: Tensor, mean: Tensor) -> tuple[Any, ...]:
        return (one_by_one(rows).argmax(), other.square())

    def another(rows: Tensor, other: Tensor, mean: Tensor) -> tuple[Any, ...]:
        return chosen(rows.flip(1), other, mean)

    assert compare(chosen, another, alike()).failed


def test_where_nothing_hangs_on_the_last_digit_an_error_stays_one() -> None:
    far_apart = alike()
    far_apart[0] = (far_apart[0].detach() * torch.arange(1.0, 5.0)[:, None]).requires_grad_()
    assert not compare(hardest, other_way_round, far_apart).reason

    def second(rows: Tensor, other: Tensor, mean: Tensor) -> Outputs:
        return (rows[one_by_one(rows).argmin()].square().sum(), hardest(rows, other, mean)[1])

    assert compare(hardest, second, far_apart).failed


def test_other_random_numbers_are_no_reason_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("eager was asked once more")

    monkeypatch.setattr(uncertain, "_nudged", never)

    def noisy(x: Tensor) -> Outputs:
        return (x + torch.randn(3),)

    def with_others(x: Tensor) -> Outputs:
        torch.randn(1)
        return noisy(x)

    assert "AssertionError" not in compare(noisy, with_others, [torch.ones(3)]).reason


def test_what_an_optimizer_holds_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("eager was asked once more")

    monkeypatch.setattr(uncertain, "_nudged", never)
    weight = torch.ones(3)

    def update(factor: float) -> Callable[..., Outputs]:
        def step(gradient: Tensor) -> Outputs:
            weight.sub_(factor * gradient)
            return ()

        return step

    assert compare(update(0.1), update(0.2), [torch.ones(3)], held=[weight]).failed
