"""Which steps the profiler looks at, and how the order travels."""

from __future__ import annotations

import pytest

from lightning_hotcompile.capture.order import (
    EXPLAIN_VARIABLE,
    VARIABLE,
    WORTH_VARIABLE,
    ExplainOrder,
    Order,
    Window,
    WorthOrder,
)
from lightning_hotcompile.errors import ConfigError


def looked_at(order: Order, steps: int = 12, decided_at: int | None = None, length: float = 1.0) -> list[int]:
    """Steps on which the window was open, each of them ``length`` seconds long."""
    window, seen = Window(order), []
    for step in range(1, steps + 1):
        window.opens(step * length, decided=decided_at is not None and step >= decided_at)
        if window.is_open:
            seen.append(step)
            window.closes((step + 1) * length)
    return seen


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order(folder="a", steps=3), [1, 2, 3]),
        (Order(folder="a", steps=3, skip=2), [3, 4, 5]),
        (Order(folder="a", seconds=2.0), [1, 2]),
        (Order(folder="a", seconds=2.5, skip=1), [2, 3, 4]),
        (Order(folder="a", seconds=0.01), [1]),
        (Order(folder="a", steps=99), list(range(1, 13))),
        (Order(folder="a", steps=3, skip=99), []),
    ],
)
def test_the_first_steps_or_seconds(order: Order, expected: list[int]) -> None:
    assert looked_at(order) == expected


def test_with_hotcompile_steps_count_from_its_decision_on() -> None:
    order = Order(folder="a", steps=2, skip=1, after_decision=True)
    assert looked_at(order, decided_at=5) == [6, 7]
    assert looked_at(order, decided_at=None) == []


def test_a_window_that_is_over_stays_closed() -> None:
    window = Window(Order(folder="a", steps=1))
    assert window.opens(0.0, decided=False)
    assert window.closes(1.0)
    assert window.is_over
    assert not window.opens(2.0, decided=True)
    assert not window.closes(3.0)


def test_an_order_travels_in_a_variable() -> None:
    order = Order(folder="/a b", seconds=2.5, skip=3, after_decision=True, command=("python", "a b.py"))
    assert Order.from_environment({VARIABLE: order.to_text()}) == order
    assert Order.from_environment({}) is None
    assert Order.from_environment({VARIABLE: " "}) is None


@pytest.mark.parametrize("text", ["1", "{", "[]", "{}", '{"folder": "a", "command": [], "x": 1}'])
def test_another_value_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}=.*unset it"):
        Order.from_environment({VARIABLE: text})


def test_the_orders_of_the_other_commands_travel_too() -> None:
    explain = ExplainOrder(folder="/a", scope="step")
    worth = WorthOrder(folder="/a", max_seconds=6.0, max_steps=3, scope="regions", backend="eager")
    assert ExplainOrder.from_environment({EXPLAIN_VARIABLE: explain.to_text()}) == explain
    assert WorthOrder.from_environment({WORTH_VARIABLE: worth.to_text()}) == worth
    assert ExplainOrder.from_environment({}) is None
    assert WorthOrder.from_environment({WORTH_VARIABLE: " "}) is None


@pytest.mark.parametrize("text", ["step", "[]", "{}", '{"folder": "/a", "more": 1}'])
def test_another_text_is_refused_by_the_commands_name(text: str) -> None:
    for variable, kind in ((EXPLAIN_VARIABLE, ExplainOrder), (WORTH_VARIABLE, WorthOrder)):
        with pytest.raises(
            ConfigError, match=f"{variable}=.* is not allowed: hotcompile {variable[11:].lower()}"
        ):
            kind.from_environment({variable: text})
