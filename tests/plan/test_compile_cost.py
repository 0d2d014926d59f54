"""What compiling a plan is expected to take."""

from __future__ import annotations

import pytest

from lightning_hotcompile.plan.compile_cost import (
    AUTOTUNE,
    BASE_COMPILE_S,
    KNOWN_STEP_S,
    SECONDS_PER_OP,
    SECONDS_PER_REGION,
    SECONDS_PER_TENSOR,
    TOOLCHAIN_S,
    assumed_compile_s,
    expected_compile_s,
)
from lightning_hotcompile.plan.prior import OpStatistics
from lightning_hotcompile.plan.scopes import Region

FIRST_S = BASE_COMPILE_S + TOOLCHAIN_S


def regions(*kinds: str, tensors: int = 0) -> tuple[Region, ...]:
    return tuple(
        Region(name=k, kind=k, members=(k,), class_name="x", tensors=tensors * (k == "optimizer"))
        for k in kinds
    )


def test_the_cost_grows_with_each_region_and_with_the_optimizers_tensors() -> None:
    assert expected_compile_s(()) == FIRST_S
    kinds = tuple(SECONDS_PER_REGION)
    assert expected_compile_s(regions(*kinds)) == FIRST_S + sum(SECONDS_PER_REGION.values())
    one, two = expected_compile_s(regions("group")), expected_compile_s(regions("group", "group"))
    assert two > one > FIRST_S
    assert expected_compile_s(regions("something new")) == expected_compile_s(regions("module"))
    few, many = (expected_compile_s(regions("optimizer", tensors=n)) for n in (10, 110))
    assert many - few == pytest.approx(100 * SECONDS_PER_TENSOR)


def test_each_kind_of_region_has_a_price() -> None:
    assert set(SECONDS_PER_REGION) == {"step", "group", "module", "function", "optimizer"}


def test_compiles_before_say_how_fast_this_machine_is() -> None:
    assumed = assumed_compile_s(regions("group"))
    history = [(40.0, 20.0), (10.0, 5.0), (30.0, 300.0)]
    assert expected_compile_s(regions("group"), history) == pytest.approx(0.5 * assumed)


def test_only_recent_compiles_count() -> None:
    history = [(10.0, 500.0)] * 40 + [(10.0, 5.0)] * 20
    assert expected_compile_s((), history) == pytest.approx(0.5 * FIRST_S)


def test_of_a_known_step_each_operation_that_is_not_fusible_counts() -> None:
    few, many = (OpStatistics(fusible=5, batch_norm=0, others=n) for n in (10, 110))
    costs = [assumed_compile_s(regions("step", "group"), ops=ops) for ops in (few, many)]
    assert costs[1] - costs[0] == pytest.approx(100 * SECONDS_PER_OP)
    assert costs[0] == pytest.approx(
        FIRST_S + KNOWN_STEP_S + 10 * SECONDS_PER_OP + SECONDS_PER_REGION["group"]
    )
    assert assumed_compile_s(regions("group"), ops=many) == assumed_compile_s(regions("group"))


def test_autotuning_takes_longer() -> None:
    kinds = regions("step")
    mode = "max-autotune-no-cudagraphs"
    usual, tuned = (assumed_compile_s(kinds, mode=m) for m in ("default", mode))
    assert usual == assumed_compile_s(kinds)
    assert tuned == pytest.approx(AUTOTUNE * usual)
    assert expected_compile_s(kinds, [(10.0, 5.0)], mode=mode) == pytest.approx(tuned / 2)


def test_a_compile_of_nothing_says_nothing() -> None:
    assert expected_compile_s((), [(0.0, 3.0)]) == FIRST_S


def test_a_toolchain_that_was_started_before_costs_nothing_more() -> None:
    cold, warm = (expected_compile_s(regions("step"), has_toolchain=has) for has in (False, True))
    assert cold - warm == pytest.approx(TOOLCHAIN_S)
    history = [(10.0, 20.0)]
    twice = [expected_compile_s(regions("step"), history, has_toolchain=has) for has in (False, True)]
    assert twice == pytest.approx([2 * cold, 2 * warm])
