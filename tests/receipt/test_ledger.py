"""The accounts of one fit, from made-up step times."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.step_record import PairedUnits, StepRecord


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
