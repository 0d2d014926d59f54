"""Units of two kinds in pairs, from made-up step times."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hotcompile.watch.stats import has_first_arm
from lightning_hotcompile.watch.step_record import PairedUnits, StepRecord


def eager(**fields: Any) -> StepRecord:
    return StepRecord(**{"phase": "observing", "compiled": False, **fields})


def compiled(**fields: Any) -> StepRecord:
    return StepRecord(**{"phase": "steady", "compiled": True, **fields})


def test_eager_and_compiled_units_in_turn() -> None:
    pairs = PairedUnits()
    for i in range(6):
        pairs.add(eager(), 3.0 + i)
        assert pairs.n == i
        pairs.add(compiled(), 2.0 + i)
    assert pairs.eager == [3.0 + i for i in range(6)]
    assert pairs.compiled == [2.0 + i for i in range(6)]
    ratio = pairs.ratio()
    assert ratio is not None
    assert ratio.verdict == "faster"


def test_too_few_give_no_ratio() -> None:
    pairs = PairedUnits()
    assert pairs.ratio() is None
    for _ in range(5):
        pairs.add(eager(), 2.0)
        pairs.add(compiled(), 1.0)
    assert (pairs.n, pairs.ratio()) == (5, None)


def test_an_eager_unit_that_waits_for_its_partner_does_not_count() -> None:
    pairs = PairedUnits()
    for _ in range(6):
        pairs.add(eager(), 2.0)
        pairs.add(compiled(), 1.0)
    pairs.add(eager(), 100.0)
    ratio = pairs.ratio()
    assert ratio is not None
    assert (ratio.n, ratio.value) == (6, 2.0)


@pytest.mark.parametrize("which", ["eager", "compiled"])
def test_a_disturbed_unit_takes_its_partner_with_it(which: str) -> None:
    pairs = PairedUnits()
    for disturbed in (False, True, False):
        pairs.add(eager(disturbed=disturbed and which == "eager"), 5.0 if disturbed else 2.0)
        pairs.add(compiled(disturbed=disturbed and which == "compiled"), 5.0 if disturbed else 1.0)
    assert (pairs.eager, pairs.compiled) == ([2.0, 2.0], [1.0, 1.0])


def test_a_unit_counts_with_what_a_batch_took_in_it() -> None:
    pairs = PairedUnits()
    for make, seconds in ((eager, 2.0), (compiled, 1.0)):
        for i in range(4):
            pairs.add(make(ends_unit=i == 3), seconds + i)
    assert (pairs.eager, pairs.compiled) == ([3.5], [2.5])


def test_units_of_another_number_of_micro_steps_are_not_partners() -> None:
    """The last unit of an epoch has fewer, and the optimizer's step weighs more in it."""
    pairs = PairedUnits()
    units = ((eager, 4, 2.0), (compiled, 2, 1.5), (compiled, 4, 1.0), (eager, 2, 3.0))
    for make, batches, seconds in units:
        for i in range(batches):
            pairs.add(make(ends_unit=i == batches - 1), seconds)
    assert (pairs.eager, pairs.compiled) == ([2.0, 3.0], [1.0, 1.5])


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_unit_that_a_step_of_another_kind_ends(disturbed: bool) -> None:
    pairs = PairedUnits()
    for number in range(6):
        make, seconds = (compiled, 1.0) if number % 2 else (eager, 2.0)
        for i in range(3):
            odd = disturbed and number == i == 1
            pairs.add(make(ends_unit=False, unit=number, disturbed=odd), seconds)
    assert pairs.n == 2 - disturbed  # whether the last one is whole is not known yet
    assert set(zip(pairs.eager, pairs.compiled, strict=True)) == {(2.0, 1.0)}


def test_one_disturbed_micro_step_disturbs_its_unit_only() -> None:
    pairs = PairedUnits()
    for disturbed in (True, False):
        pairs.add(eager(ends_unit=False, disturbed=disturbed), 2.0)
        pairs.add(eager(), 2.0)
        pairs.add(compiled(ends_unit=False), 1.0)
        pairs.add(compiled(), 1.0)
    assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])


def test_two_eager_units_in_a_row_the_later_one_is_the_partner() -> None:
    pairs = PairedUnits()
    pairs.add(eager(), 9.0)
    pairs.add(eager(), 2.0)
    pairs.add(compiled(), 1.0)
    assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])


def test_either_kind_may_come_first() -> None:
    pairs = PairedUnits()
    for record, seconds in ((eager(), 2.0), (compiled(), 1.0), (compiled(), 1.5), (eager(), 3.0)):
        pairs.add(record, seconds)
    assert (pairs.eager, pairs.compiled) == ([2.0, 3.0], [1.0, 1.5])


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("heavy", [1.3, 2.0, 10.0])
@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("first", range(3))
def test_steps_that_are_heavy_in_turns_do_not_bias_the_ratio(
    period: int, heavy: float, gain: float, first: int
) -> None:
    """Accumulation with manual optimization, optimizers that take turns: one step in so many is heavy."""
    pairs = PairedUnits()
    for turn in range(80):
        seconds = heavy if (turn + first) % period == period - 1 else 1.0
        is_eager = has_first_arm(turn)
        pairs.add(eager() if is_eager else compiled(), seconds * (gain if is_eager else 1.0))
    ratio = pairs.ratio()
    assert ratio is not None
    assert ratio.n == 40
    assert ratio.value == pytest.approx(gain, rel=1e-6)


def test_a_compiled_unit_without_an_eager_one_is_left_out() -> None:
    pairs = PairedUnits()
    pairs.add(compiled(), 1.0)
    pairs.add(eager(), 2.0)
    pairs.add(compiled(), 1.0)
    pairs.add(compiled(), 7.0)
    assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])
