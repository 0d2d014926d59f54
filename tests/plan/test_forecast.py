"""Whether compiling pays, and the reason in words."""

from __future__ import annotations

import math
import re

import pytest

from lightning_hotcompile.plan.forecast import (
    BASE_COMPILE_S,
    SECONDS_PER_REGION,
    SPEEDUP_OF_REGIONS,
    SPEEDUP_OF_STEP,
    SPEEDUP_WITH_OPTIMIZER,
    Decision,
    Expectation,
    expected_compile_s,
    expected_speedup,
    forecast,
)


def expect(compile_s: float, speedup: float) -> Expectation:
    return Expectation(compile_s=compile_s, speedup=speedup)


def test_a_long_run_is_worth_it_and_says_why() -> None:
    decision = forecast(remaining_steps=10_000, step_s=0.05, expected=expect(22.0, 1.25))
    assert decision.go
    assert decision.expected_saving_s == pytest.approx(100.0)
    assert decision.expected_cost_s == 22.0
    assert decision.reason == (
        "worth it: 10,000 steps of 50 ms are left, at an assumed speed-up of 1.25x compiling saves "
        "about 100.0 s and costs about 22 s"
    )


def test_a_short_run_is_not_and_says_why() -> None:
    decision = forecast(remaining_steps=50, step_s=0.02, expected=expect(22.0, SPEEDUP_OF_STEP))
    assert not decision.go
    assert decision.reason.startswith("not worth it: 50 steps of 20 ms are left")
    assert decision.expected_saving_s == pytest.approx(50 * 0.02 * (1 - 1 / SPEEDUP_OF_STEP))


@pytest.mark.parametrize("remaining", [0, 1, 10, 500, 10**6])
@pytest.mark.parametrize("step_s", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("speedup", [1.0, 1.1, 2.0])
def test_it_goes_exactly_when_the_saving_exceeds_the_cost(
    remaining: int, step_s: float, speedup: float
) -> None:
    decision = forecast(remaining_steps=remaining, step_s=step_s, expected=expect(20.0, speedup))
    assert decision.expected_saving_s is not None
    assert math.isclose(decision.expected_saving_s, remaining * (step_s - step_s / speedup), abs_tol=1e-9)
    assert decision.go == (decision.expected_saving_s > 20.0)


def test_even_is_not_enough() -> None:
    assert not forecast(remaining_steps=100, step_s=1.0, expected=expect(50.0, 2.0)).go


def test_what_is_compiled_already_costs_nothing_more() -> None:
    assert forecast(remaining_steps=1, step_s=0.01, expected=expect(0.0, SPEEDUP_OF_STEP)).go
    assert not forecast(remaining_steps=0, step_s=0.01, expected=expect(0.0, SPEEDUP_OF_STEP)).go


def test_an_expected_slowdown_is_declined() -> None:
    decision = forecast(remaining_steps=10**6, step_s=0.1, expected=expect(1.0, 0.8))
    assert not decision.go
    assert decision.expected_saving_s is not None
    assert decision.expected_saving_s < 0


@pytest.mark.parametrize(("spent_s", "go"), [(0.0, False), (21.9, False), (22.0, True), (500.0, True)])
def test_a_run_of_unknown_length_rents_until_it_has_paid_the_price(spent_s: float, go: bool) -> None:
    expected = expect(22.0, SPEEDUP_OF_STEP)
    decision = forecast(remaining_steps=None, step_s=0.05, expected=expected, spent_s=spent_s)
    assert (decision.go, decision.wait) == (go, not go)
    assert "unknown" in decision.reason
    assert "50 ms" in decision.reason
    assert decision.expected_saving_s is None


def test_the_regret_of_an_unknown_length_is_bounded() -> None:
    """Whatever the length: never more than the best of all eager and compiled at once, plus one price."""
    price, step_s, speedup = 20.0, 0.1, 1.5
    for steps in (1, 10, 199, 200, 201, 1_000, 10_000):
        ran, compiled = 0.0, False
        for _ in range(steps):
            expected = expect(price, speedup)
            if (
                not compiled
                and forecast(remaining_steps=None, step_s=step_s, expected=expected, spent_s=ran).go
            ):
                compiled, ran = True, ran + price
            ran += step_s / speedup if compiled else step_s
        best = min(steps * step_s, price + steps * step_s / speedup)
        assert ran <= best + price + 1e-6


@pytest.mark.parametrize("remaining", [None, 5])
def test_nothing_measured_yet_goes(remaining: int | None) -> None:
    decision = forecast(remaining_steps=remaining, step_s=None, expected=expect(22.0, SPEEDUP_OF_STEP))
    assert decision.go
    assert "threshold=0" in decision.reason


def test_the_cost_grows_with_each_region() -> None:
    assert expected_compile_s(()) == BASE_COMPILE_S
    kinds = tuple(SECONDS_PER_REGION)
    assert expected_compile_s(kinds) == BASE_COMPILE_S + sum(SECONDS_PER_REGION.values())
    assert expected_compile_s(("group", "group")) > expected_compile_s(("group",)) > BASE_COMPILE_S
    assert expected_compile_s(("something new",)) > BASE_COMPILE_S


def test_each_kind_of_region_has_a_price() -> None:
    assert set(SECONDS_PER_REGION) == {"step", "group", "module", "function", "optimizer"}


def test_numbers_read_well() -> None:
    reason = forecast(
        remaining_steps=1_234_567, step_s=1.23456e-3, expected=expect(12.345, SPEEDUP_OF_STEP)
    ).reason
    assert re.search(r"1,234,567 steps of 1\.23 ms", reason)
    assert reason.endswith("costs about 12 s")


def test_a_decision_has_its_reason() -> None:
    with pytest.raises(TypeError):
        Decision(go=True)  # type: ignore[call-arg]


def test_the_expected_speed_up_depends_on_what_is_compiled() -> None:
    assert expected_speedup(("step", "optimizer")) == SPEEDUP_WITH_OPTIMIZER
    assert expected_speedup(("step",)) == SPEEDUP_OF_STEP
    assert expected_speedup(("group", "module", "optimizer")) == SPEEDUP_OF_REGIONS


def test_a_measured_speed_up_is_called_so() -> None:
    expected = Expectation(compile_s=2.0, speedup=1.5, measured=True)
    decision = forecast(remaining_steps=1000, step_s=0.1, expected=expected)
    assert "at the measured speed-up of 1.50x" in decision.reason


def test_compiles_of_the_same_kinds_are_believed_as_they_are() -> None:
    kinds = ("step", "optimizer")
    history = [(kinds, 50.0), (kinds, 60.0), (("group",), 1.0), (kinds, 70.0)]
    assert expected_compile_s(kinds, history) == 60.0


def test_other_compiles_say_how_fast_this_machine_is() -> None:
    assumed = expected_compile_s(("group",))
    history = [(("step",), expected_compile_s(("step",)) * 0.5)] * 3
    assert expected_compile_s(("group",), history) == pytest.approx(0.5 * assumed)


def test_only_recent_compiles_count() -> None:
    kinds = ("step",)
    history = [(kinds, 500.0)] * 40 + [(kinds, 5.0)] * 20
    assert expected_compile_s(kinds, history) == 5.0
