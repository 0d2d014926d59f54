"""Numbers that vary, looked for in a list, told apart and chosen, and losses that are chosen: as in eager."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import Counting


class LikeFive:
    """No number, and equal to one."""

    asked = 0

    def __eq__(self, other: object) -> bool:
        self.asked += 1
        return other == 5

    __hash__ = None  # type: ignore[assignment]


class Holds:
    """Numbers that are others in each call."""

    found: Any = None

    def __init__(self) -> None:
        self.like_five, self.five = LikeFive(), torch.tensor(5)

    def at(self, step: int) -> None:
        self.steps = [step, step + 1]
        self.pair = (step, step + 1)
        self.latest = deque(self.steps)
        self.rates = [step + 0.5, step - 0.5]
        self.n, self.rate = step, step / 4


def looks_in_lists(h: Holds, x: Tensor) -> Tensor:
    h.found = 5 in h.steps, 5 in h.pair, 5 in h.latest, 2.5 in h.rates, 4.0 in h.steps, "5" in h.steps
    return x.sin() * (2.0 if 4 not in h.steps else 3.0)


def looks_in_a_shape(h: Holds, x: Tensor) -> Tensor:
    h.found = (
        4 in x.shape,
        4 in [x.shape[0], 3],
        x.shape[0] in [4, 9],
        x.shape in [(4, 3)],
        3 in tuple(x.shape),
    )
    return x.sin()


def looks_among_others(h: Holds, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.found = 5 in [h.like_five, n], n in [7, h.like_five], n in [h.five, n + 1], h.like_five.asked
    return x.sin()


def asks_whether_it_is_true(h: Holds, x: Tensor) -> Tensor:
    h.found = (
        (x.shape[0] > 4) is True,
        (h.n > 3) is not False,
        operator.is_(h.n == 2, True),
        (h.rate > 0.5) is True,
    )
    return x.sin()


def takes_the_largest(h: Holds, x: Tensor) -> Tensor:
    h.found = (
        max(3, h.rate),
        max(h.n, 2.5),
        min([h.n, 2.5]),
        min(h.rate, 1),
        max(h.n, 3.0),
        max((1, h.rate, h.n)),
    )
    h.found += max(h.n, 3), min(h.rate, 0.5), max(h.rate, 0.5)
    return x.sin() * max(1, h.rate)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [looks_in_lists, looks_in_a_shape, asks_whether_it_is_true, takes_the_largest],
)
def test_it_is_as_in_eager(function: Callable[[Holds, Tensor], Tensor], dynamic: bool | None) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=dynamic, fullgraph=False)
    plain, ours = Holds(), Holds()
    with compiling_allowed(suppress_errors=False):
        for step in range(7):
            plain.at(step)
            ours.at(step)
            x = torch.ones(2 + step, 3)
            torch.testing.assert_close(compiled.compile(ours, x), function(plain, x))
            assert repr(ours.found) == repr(plain.found)
    assert backend.runs


class Losses:
    """Two of them, each of a weight of its own; the root of the second one may be that of nothing."""

    def __init__(self) -> None:
        self.a, self.b = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)

    def of(self, x: Tensor) -> list[Tensor]:
        return [self.a * x.sum(), (self.b * x[1]).sqrt()]


def takes_the_worst(two: Losses, x: Tensor) -> Tensor:
    return max(two.of(x)) * 2


def takes_the_better(two: Losses, x: Tensor) -> Tensor:
    return x.sum() - min(*two.of(x))


def has_a_margin(two: Losses, x: Tensor) -> Tensor:
    first, second = two.of(x)
    return first.square() + max(0, second)


def has_one_of_the_same(two: Losses, x: Tensor) -> Tensor:
    first, _ = two.of(x)
    return min(first, 1.0) + max(first, 2 * first - 1)


@pytest.mark.parametrize("function", [takes_the_worst, takes_the_better, has_a_margin, has_one_of_the_same])
def test_a_loss_that_is_not_chosen_has_no_gradient(function: Callable[[Losses, Tensor], Tensor]) -> None:
    """Zeros let an optimizer go on with weight decay and momentum, and 0 times an infinite one is NaN."""
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for x in ([1.0, 0.0], [0.5, 4.0], [-3.0, 2.5], [3.0, 1.0]):
            plain, ours = Losses(), Losses()
            expected, found = function(plain, torch.tensor(x)), compiled.compile(ours, torch.tensor(x))
            torch.testing.assert_close(found, expected)
            expected.backward()
            found.backward()
            assert repr((ours.a.grad, ours.b.grad)) == repr((plain.a.grad, plain.b.grad))
    assert backend.runs


def test_the_largest_of_tensors_without_gradients_is_in_the_graph() -> None:
    compiled = CompiledFunction(takes_the_worst, Counting(), dynamic=None, fullgraph=True)
    with compiling_allowed(suppress_errors=False), torch.no_grad():
        x = torch.tensor([1.0, 4.0])
        torch.testing.assert_close(compiled.compile(Losses(), x), takes_the_worst(Losses(), x))


def test_what_is_no_number_is_asked_whether_it_is_equal() -> None:
    compiled = CompiledFunction(looks_among_others, Counting(), dynamic=None, fullgraph=False)
    plain, ours = Holds(), Holds()
    with compiling_allowed(suppress_errors=False):
        for rows in range(2, 9):
            x = torch.ones(rows, 3)
            torch.testing.assert_close(compiled.compile(ours, x), looks_among_others(plain, x))
            assert repr(ours.found) == repr(plain.found)


def test_a_number_that_is_looked_for_is_compiled_a_few_times() -> None:
    """Once for each outcome, and not for each step."""
    backend = Counting()

    def function(h: Holds, x: Tensor) -> Tensor:
        return x.cos() if 20 in h.steps else x.sin()

    compiled, holds = CompiledFunction(function, backend, dynamic=None, fullgraph=True), Holds()
    with compiling_allowed(suppress_errors=False):
        for step in range(24):
            holds.at(step)
            torch.testing.assert_close(compiled.compile(holds, torch.ones(3)), function(holds, torch.ones(3)))
    assert backend.graphs <= 4
