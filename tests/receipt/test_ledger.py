"""The accounts of one fit, from made-up step times."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.step_record import PairedUnits, StepRecord
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.stats import has_first_arm


def eager(**fields: Any) -> StepRecord:
    return StepRecord(**{"phase": "observing", "compiled": False, **fields})


def compiled(**fields: Any) -> StepRecord:
    return StepRecord(**{"phase": "steady", "compiled": True, **fields})


def book(ledger: Ledger, seconds: float, record: StepRecord, wait: float = 0.0) -> None:
    ledger.add(StepTime(tag=record, seconds=seconds, wait_seconds=wait), record)


def settle(ledger: Ledger, pairs: int, eager_s: float, compiled_s: float) -> None:
    settling = {"phase": "settling", "pairs": ledger.pairs}
    for _ in range(pairs):
        book(ledger, eager_s, eager(**settling))
        book(ledger, compiled_s, compiled(**settling))


class TestPairs:
    def test_eager_and_compiled_units_in_turn(self) -> None:
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

    def test_too_few_give_no_ratio(self) -> None:
        pairs = PairedUnits()
        assert pairs.ratio() is None
        for _ in range(5):
            pairs.add(eager(), 2.0)
            pairs.add(compiled(), 1.0)
        assert (pairs.n, pairs.ratio()) == (5, None)

    def test_an_eager_unit_that_waits_for_its_partner_does_not_count(self) -> None:
        pairs = PairedUnits()
        for _ in range(6):
            pairs.add(eager(), 2.0)
            pairs.add(compiled(), 1.0)
        pairs.add(eager(), 100.0)
        ratio = pairs.ratio()
        assert ratio is not None
        assert (ratio.n, ratio.value) == (6, 2.0)

    @pytest.mark.parametrize("which", ["eager", "compiled"])
    def test_a_disturbed_unit_takes_its_partner_with_it(self, which: str) -> None:
        pairs = PairedUnits()
        for disturbed in (False, True, False):
            pairs.add(eager(disturbed=disturbed and which == "eager"), 5.0 if disturbed else 2.0)
            pairs.add(compiled(disturbed=disturbed and which == "compiled"), 5.0 if disturbed else 1.0)
        assert (pairs.eager, pairs.compiled) == ([2.0, 2.0], [1.0, 1.0])

    def test_a_unit_counts_with_what_a_batch_took_in_it(self) -> None:
        pairs = PairedUnits()
        for make, seconds in ((eager, 2.0), (compiled, 1.0)):
            for i in range(4):
                pairs.add(make(ends_unit=i == 3), seconds + i)
        assert (pairs.eager, pairs.compiled) == ([3.5], [2.5])

    def test_units_of_another_number_of_micro_steps_are_not_partners(self) -> None:
        """The last unit of an epoch has fewer, and the optimizer's step weighs more in it."""
        pairs = PairedUnits()
        units = ((eager, 4, 2.0), (compiled, 2, 1.5), (compiled, 4, 1.0), (eager, 2, 3.0))
        for make, batches, seconds in units:
            for i in range(batches):
                pairs.add(make(ends_unit=i == batches - 1), seconds)
        assert (pairs.eager, pairs.compiled) == ([2.0, 3.0], [1.0, 1.5])

    @pytest.mark.parametrize("disturbed", [False, True])
    def test_a_unit_that_a_step_of_another_kind_ends(self, disturbed: bool) -> None:
        pairs = PairedUnits()
        for number in range(6):
            make, seconds = (compiled, 1.0) if number % 2 else (eager, 2.0)
            for i in range(3):
                odd = disturbed and number == i == 1
                pairs.add(make(ends_unit=False, unit=number, disturbed=odd), seconds)
        assert pairs.n == 2 - disturbed  # whether the last one is whole is not known yet
        assert set(zip(pairs.eager, pairs.compiled, strict=True)) == {(2.0, 1.0)}

    def test_one_disturbed_micro_step_disturbs_its_unit_only(self) -> None:
        pairs = PairedUnits()
        for disturbed in (True, False):
            pairs.add(eager(ends_unit=False, disturbed=disturbed), 2.0)
            pairs.add(eager(), 2.0)
            pairs.add(compiled(ends_unit=False), 1.0)
            pairs.add(compiled(), 1.0)
        assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])

    def test_two_eager_units_in_a_row_the_later_one_is_the_partner(self) -> None:
        pairs = PairedUnits()
        pairs.add(eager(), 9.0)
        pairs.add(eager(), 2.0)
        pairs.add(compiled(), 1.0)
        assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])

    def test_either_kind_may_come_first(self) -> None:
        pairs = PairedUnits()
        for record, seconds in ((eager(), 2.0), (compiled(), 1.0), (compiled(), 1.5), (eager(), 3.0)):
            pairs.add(record, seconds)
        assert (pairs.eager, pairs.compiled) == ([2.0, 3.0], [1.0, 1.5])

    @pytest.mark.parametrize("gain", [0.9, 1.0, 1.1])
    @pytest.mark.parametrize("heavy", [1.3, 2.0, 10.0])
    @pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8])
    @pytest.mark.parametrize("first", range(3))
    def test_steps_that_are_heavy_in_turns_do_not_bias_the_ratio(
        self, period: int, heavy: float, gain: float, first: int
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

    def test_a_compiled_unit_without_an_eager_one_is_left_out(self) -> None:
        pairs = PairedUnits()
        pairs.add(compiled(), 1.0)
        pairs.add(eager(), 2.0)
        pairs.add(compiled(), 1.0)
        pairs.add(compiled(), 7.0)
        assert (pairs.eager, pairs.compiled) == ([2.0], [1.0])


class TestPairsOfASignature:
    def test_a_step_that_names_its_pairs_is_added_there(self) -> None:
        ledger, mine = Ledger(), PairedUnits()
        ledger.pairs = mine  # what the flip does: each signature has pairs of its own
        settle(ledger, 3, 0.2, 0.1)
        assert (mine.eager, mine.compiled) == ([0.2] * 3, [0.1] * 3)

    def test_a_step_without_pairs_is_not_compared(self) -> None:
        ledger = Ledger()
        book(ledger, 0.2, eager(phase="settling"))
        book(ledger, 0.1, compiled(phase="settling"))
        assert ledger.pairs.n == 0
        assert ledger.steps == 2

    def test_pairs_of_another_signature_are_left_alone(self) -> None:
        ledger, other = Ledger(), PairedUnits()
        settle(ledger, 3, 0.2, 0.1)
        book(ledger, 9.0, eager(phase="settling", pairs=other))
        book(ledger, 1.0, compiled(phase="settling", pairs=other))
        assert (ledger.pairs.n, other.n) == (3, 1)
        assert ledger.eager_ms is not None
        assert ledger.eager_ms.median == pytest.approx(200.0)

    def test_new_pairs_after_a_second_flip_replace_the_old_ones(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        ledger.pairs = PairedUnits()
        assert ledger.pairs.ratio() is None
        settle(ledger, 10, 0.3, 0.1)
        ratio = ledger.pairs.ratio()
        assert ratio is not None
        assert (ratio.n, ratio.value) == (10, pytest.approx(3.0))


class TestTimes:
    def test_nothing_booked_is_nothing_known(self) -> None:
        ledger = Ledger()
        unknown = ("eager_ms", "compiled_ms", "eager_step_s", "recent_step_ms", "saved_s", "break_even_step")
        shares = ("wait_share", "own_us", "total_speedup")
        assert [getattr(ledger, name) for name in (*unknown, *shares)] == [None] * 9
        assert (ledger.stall_s, ledger.costs_s, ledger.phases()) == (0.0, 0.0, ())

    def test_medians_in_milliseconds(self) -> None:
        ledger = Ledger()
        for seconds in (0.01, 0.02, 0.09):
            book(ledger, seconds, eager())
            book(ledger, seconds / 2, compiled())
        assert ledger.eager_ms is not None
        assert ledger.compiled_ms is not None
        assert ledger.eager_ms.median == pytest.approx(20.0)
        assert ledger.compiled_ms.median == pytest.approx(10.0)
        assert ledger.eager_step_s == pytest.approx(0.02)
        assert ledger.recent_step_ms == pytest.approx(45.0)
        assert ledger.steps == 6

    def test_disturbed_steps_are_not_compared(self) -> None:
        ledger = Ledger()
        book(ledger, 0.01, eager())
        book(ledger, 9.0, eager(disturbed=True))
        assert ledger.eager_step_s == pytest.approx(0.01)
        assert ledger.phases()[0].steps == 2
        assert ledger.phases()[0].total_s == pytest.approx(9.01)
        assert ledger.phases()[0].median_ms == pytest.approx(10.0)

    def test_interleaved_steps_go_before_earlier_ones(self) -> None:
        ledger = Ledger()
        for _ in range(20):
            book(ledger, 0.5, eager())
        settle(ledger, 3, 0.02, 0.01)
        assert ledger.eager_ms is not None
        assert ledger.eager_ms.median == pytest.approx(20.0)
        assert ledger.eager_ms.n == 3

    def test_phases_in_order_of_first_use(self) -> None:
        ledger = Ledger()
        for phase in ("observing", "settling", "observing", "steady"):
            book(ledger, 0.01, eager(phase=phase))
        assert [(p.name, p.steps) for p in ledger.phases()] == [
            ("observing", 2),
            ("settling", 1),
            ("steady", 1),
        ]

    def test_a_phase_of_disturbed_steps_has_no_median(self) -> None:
        ledger = Ledger()
        book(ledger, 3.0, eager(phase="flipping", disturbed=True))
        (phase,) = ledger.phases()
        assert (phase.median_ms, phase.iqr_ms, phase.total_s) == (None, None, 3.0)

    def test_share_of_waiting(self) -> None:
        ledger = Ledger()
        book(ledger, 0.03, eager(), wait=0.01)
        assert ledger.wait_share == pytest.approx(0.25)

    def test_what_the_callback_does_between_steps_is_no_waiting(self) -> None:
        ledger = Ledger()
        ledger.install_s = 5.0  # before the first step: between no two
        book(ledger, 0.03, eager())
        ledger.install_s += 2.0
        ledger.own_s += 0.005
        book(ledger, 0.03, eager(), wait=2.045)
        assert ledger.wait_share == pytest.approx(0.04 / 2.105)

    def test_between_two_steps_on_average_without_a_pause_that_came_once(self) -> None:
        ledger = Ledger()
        assert ledger.wait_s == 0.0
        for wait in (0.0, 0.1, 50.0, 0.1, 0.1, 0.2):
            book(ledger, 0.01, eager(), wait=wait)
        assert ledger.wait_s == pytest.approx(0.5 / 6)

    def test_own_time_per_step(self) -> None:
        ledger = Ledger()
        for _ in range(4):
            book(ledger, 0.01, eager())
        ledger.own_s = 80e-6
        assert ledger.own_us == pytest.approx(20.0)


class TestStepsThatWereNotTimed:
    def skip(self, ledger: Ledger, seconds: float, between_s: float) -> float:
        """Seconds that 60 of them are taken to have had."""
        before_s = ledger.spent_s
        ledger.skip(60, seconds, between_s, "steady", compiled=True)
        return ledger.spent_s - before_s

    def test_a_pause_among_them_is_between_them(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        saved_s = ledger.saved_s
        assert saved_s is not None
        assert self.skip(ledger, 6.0, 500.0) == pytest.approx(6.0)
        assert ledger.saved_s == pytest.approx(saved_s + 6.0)
        assert ledger.wait_share == pytest.approx(500 / 509)
        assert ledger.recent_step_ms == pytest.approx(100.0)

    def test_what_takes_longer_than_usual_is_theirs(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        assert self.skip(ledger, 12.0, 0.0) == pytest.approx(12.0)

    @pytest.mark.parametrize("pause_s", [0.0, 500.0])
    def test_an_accelerator_works_on_between_them(self, pause_s: float) -> None:
        """The host has started a step in 10 ms, and waits in a callback until it is done."""
        ledger = Ledger()
        book(ledger, 0.2, eager(), wait=0.0)
        for _ in range(10):
            book(ledger, 0.1, compiled(), wait=0.0)
        assert self.skip(ledger, 0.6, 5.4 + pause_s) == pytest.approx(6.0)

    def test_of_that_they_have_what_they_usually_have(self) -> None:
        ledger = Ledger()
        for _ in range(10):
            book(ledger, 0.1, compiled(), wait=0.1)
        assert self.skip(ledger, 0.6, 5.4) == pytest.approx(3.0)

    def test_before_one_was_timed_they_have_what_the_host_saw(self) -> None:
        assert self.skip(Ledger(), 0.6, 5.4) == pytest.approx(0.6)


class TestCosts:
    def test_a_step_that_compiled_costs_what_it_took_beyond_an_eager_one(self) -> None:
        ledger = Ledger()
        for _ in range(3):
            book(ledger, 0.1, eager())
        ledger.install_s = 2.0
        book(ledger, 5.1, compiled(phase="flipping", stalled=True, disturbed=True))
        assert ledger.stall_s == pytest.approx(2.0 + 5.0)

    def test_a_recorded_step_is_a_cost_but_no_stall(self) -> None:
        ledger = Ledger()
        book(ledger, 0.1, eager())
        book(ledger, 0.4, eager(recorded=True, disturbed=True))
        ledger.own_s = 0.05
        assert ledger.stall_s == 0.0
        assert ledger.costs_s == pytest.approx(0.3 + 0.05)

    def test_a_cost_is_never_negative(self) -> None:
        ledger = Ledger()
        book(ledger, 0.1, eager())
        book(ledger, 0.01, compiled(stalled=True, disturbed=True))
        assert ledger.costs_s == 0.0


class TestSavings:
    def test_by_the_paired_ratio(self) -> None:
        ledger = Ledger()
        for _ in range(10):
            book(ledger, 9.0, eager())  # a slower machine back then: the pairs decide
        settle(ledger, 10, 0.2, 0.1)
        for _ in range(90):
            book(ledger, 0.1, compiled())
        assert ledger.pairs.n == 10
        assert ledger.saved_s == pytest.approx(100 * 0.1 * (2.0 - 1))

    def test_without_pairs_by_the_medians(self) -> None:
        ledger = Ledger()
        for _ in range(10):
            book(ledger, 0.2, eager())
        for _ in range(100):
            book(ledger, 0.1, compiled())
        assert ledger.saved_s == pytest.approx(100 * 0.1)

    def test_costs_are_taken_off(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        gross = ledger.saved_s
        assert gross is not None
        ledger.install_s, ledger.own_s = 3.0, 0.5
        assert ledger.saved_s == pytest.approx(gross - 3.5)

    def test_in_all_with_what_goes_by_between_the_steps(self) -> None:
        ledger = Ledger()
        for _ in range(10):
            book(ledger, 0.2, eager(), wait=0.1)
        for _ in range(100):
            book(ledger, 0.1, compiled(), wait=0.1)
        assert ledger.total_speedup == pytest.approx((110 * 0.3) / (10 * 0.3 + 100 * 0.2))

    def test_in_all_no_faster_where_the_costs_are_as_much(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        ledger.own_s = 1.0
        assert ledger.saved_s == pytest.approx(0.0)
        assert ledger.total_speedup == pytest.approx(1.0)

    def test_in_all_with_what_was_installed_before_the_first_step(self) -> None:
        ledger = Ledger()
        ledger.install_s = 6.0
        settle(ledger, 10, 0.2, 0.1)
        assert ledger.total_speedup == pytest.approx((9.0 + 1.0 - 6.0) / 9.0)

    def test_negative_savings_are_shown_as_such(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.1, 0.2)
        assert ledger.saved_s == pytest.approx(-10 * 0.1)
        assert ledger.break_even_step is None

    def test_a_gain_that_did_not_earn_its_costs_back_is_negative(self) -> None:
        ledger = Ledger()
        ledger.install_s, ledger.flip_step = 20.0, 10
        settle(ledger, 10, 0.2, 0.1)
        assert ledger.saved_s == pytest.approx(1.0 - 20.0)
        assert ledger.break_even_step == 210

    def test_only_one_kind_of_steps_gives_nothing(self) -> None:
        ledger = Ledger()
        book(ledger, 0.1, compiled())
        assert ledger.saved_s is None
        other = Ledger()
        book(other, 0.1, eager())
        assert other.saved_s is None

    def test_stalled_steps_save_nothing(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.2, 0.1)
        before = ledger.saved_s
        assert before is not None
        book(ledger, 10.2, compiled(stalled=True, disturbed=True))
        assert ledger.saved_s == pytest.approx(before - 10.0)

    def test_break_even_is_the_batch_that_earns_the_costs_back(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.3, 0.2)
        ledger.install_s, ledger.flip_step = 5.0, 12
        assert ledger.break_even_step == pytest.approx(12 + 50, abs=1)

    def test_break_even_is_unknown_without_a_flip(self) -> None:
        ledger = Ledger()
        settle(ledger, 10, 0.3, 0.2)
        assert ledger.break_even_step is None

    def test_break_even_counts_batches_under_accumulation(self) -> None:
        ledger = Ledger()
        ledger.flip_step = 0
        ledger.install_s = 4.0
        for _ in range(10):
            for make, seconds in ((eager, 0.2), (compiled, 0.1)):
                settling = {"phase": "settling", "pairs": ledger.pairs}
                book(ledger, seconds, make(**settling, ends_unit=False))
                book(ledger, seconds, make(**settling))
        assert ledger.break_even_step == pytest.approx(40, abs=1)
        assert ledger.saved_s == pytest.approx(20 * 0.1 - 4.0)
