"""Whether compiling pays, and the reason in words."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from lightning_hotcompile.plan.forecast import (
    CHEAP,
    MOST_UNASKED,
    WARM_SHARE,
    Child,
    Decision,
    Expectation,
    expected_speedup,
    forecast,
    forgone_s,
    too_short,
)
from lightning_hotcompile.plan.one_more import GAIN_OF_ONE_MORE, worth_one_more
from lightning_hotcompile.plan.prior import PRIOR, OpStatistics
from lightning_hotcompile.plan.scopes import Region

SOME = 1.18


def regions(*kinds: str, tensors: int = 0) -> tuple[Region, ...]:
    return tuple(
        Region(name=k, kind=k, members=(k,), class_name="x", tensors=tensors * (k == "optimizer"))
        for k in kinds
    )


def expect(compile_s: float, speedup: float) -> Expectation:
    return Expectation(compile_s=compile_s, speedup=speedup)


def test_a_plan_that_makes_the_step_slower_is_said_to_save_nothing() -> None:
    found = forecast(remaining_steps=50, step_s=0.001, expected=Expectation(compile_s=29.0, speedup=0.8))
    assert not found.go
    assert "compiling saves nothing and costs about 29 s" in found.reason


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
    decision = forecast(remaining_steps=50, step_s=0.02, expected=expect(22.0, SOME))
    assert not decision.go
    assert decision.reason.startswith("not worth it: 50 steps of 20 ms are left")
    assert decision.expected_saving_s == pytest.approx(50 * 0.02 * (1 - 1 / SOME))


class TestTooShort:
    def test_what_is_left_takes_less_than_half_of_loading_the_code(self) -> None:
        decision = too_short(remaining_steps=47, step_s=0.0011, load_s=1.2)
        assert decision is not None
        assert not decision.go
        assert decision.reason == (
            "not worth it: 47 steps of 1.1 ms are left, in all 0.052 s, and loading compiled code alone "
            "takes about 1.2 s"
        )
        assert (
            forgone_s(47 * 0.0011, expect(1.2 / WARM_SHARE, 100.0)) == 0
        )  # nor does it count for later runs

    @pytest.mark.parametrize(
        ("remaining", "step_s"), [(600, 0.0011), (1, 10.0), (None, 0.0011), (47, None), (None, None)]
    )
    def test_a_longer_run_and_one_of_unknown_length_are_watched(
        self, remaining: int | None, step_s: float | None
    ) -> None:
        assert too_short(remaining_steps=remaining, step_s=step_s, load_s=1.2) is None


@pytest.mark.parametrize("remaining", [0, 1, 10, 500, 10**6])
@pytest.mark.parametrize("step_s", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("speedup", [1.0, 1.1, 2.0])
def test_it_goes_exactly_when_the_saving_exceeds_the_cost_or_the_cost_is_next_to_nothing(
    remaining: int, step_s: float, speedup: float
) -> None:
    decision = forecast(remaining_steps=remaining, step_s=step_s, expected=expect(20.0, speedup))
    assert decision.expected_saving_s is not None
    assert math.isclose(decision.expected_saving_s, remaining * (step_s - step_s / speedup), abs_tol=1e-9)
    cheap = CHEAP * remaining * step_s > 20.0
    assert decision.go == (decision.expected_saving_s > 20.0 or cheap)


def test_a_child_process_makes_it_cheaper_but_the_gain_comes_later() -> None:
    inline = Expectation(compile_s=20.0, speedup=1.5)
    ahead = Expectation(compile_s=20.0, speedup=1.5, child=Child(seconds=20.0, slowed=0.1))
    assert (inline.cost_s, inline.wait_s) == (20.0, 0.0)
    assert (ahead.cost_s, ahead.wait_s) == (5.0, 20.0)
    found = [forecast(remaining_steps=n, step_s=0.1, expected=ahead) for n in (100, 200, 340, 360)]
    assert [f.expected_saving_s for f in found] == pytest.approx([0.0, 0.0, 14 / 3, 16 / 3])
    assert [f.go for f in found] == [False, False, False, True]
    assert not forecast(remaining_steps=360, step_s=0.1, expected=inline).go


class TestWithoutTheChild:
    """Where a child process would cost more, the step itself compiles; in a long run that is little."""

    slow = Expectation(compile_s=20.0, speedup=1.5, child=Child(seconds=40.0, slowed=0.4))

    @pytest.mark.parametrize(
        ("steps", "go", "inline"),
        [
            (590, False, False),
            (610, True, True),
            (980, True, True),
            (12_300, True, True),
            (12_400, True, False),
        ],
    )
    def test_the_child_costs_at_most_a_hundredth_of_what_is_left(
        self, steps: int, go: bool, inline: bool
    ) -> None:
        found = forecast(remaining_steps=steps, step_s=0.1, expected=self.slow)
        # 20 s to save 1/3 of what is left, or 19 s to save it 40 s later: 12.3 s more
        assert (found.go, found.inline) == (go, inline)

    def test_the_reason_names_both(self) -> None:
        assert forecast(remaining_steps=610, step_s=0.1, expected=self.slow).reason == (
            "worth it: 610 steps of 100 ms are left, at an assumed speed-up of 1.50x compiling saves about "
            "20.3 s and costs about 20 s; a child process would take about 40 s"
        )

    def test_a_child_that_was_asked_for_is_not_replaced(self) -> None:
        assert not forecast(remaining_steps=610, step_s=0.1, expected=self.slow, or_inline=False).go

    def test_with_a_spare_core_the_child_is_always_the_better_way(self) -> None:
        spare = Expectation(compile_s=20.0, speedup=1.5, child=Child(seconds=20.0))
        assert not any(
            forecast(remaining_steps=steps, step_s=0.1, expected=spare).inline for steps in range(0, 2000, 10)
        )


class TestRunsBefore:
    """What runs that declined would have saved counts, within bounds."""

    def decided(self, forgone_s: float, *, steps: int = 1000, speedup: float = 1.25) -> Decision:
        expected = Expectation(compile_s=30.0, speedup=speedup, forgone_s=forgone_s)
        return forecast(remaining_steps=steps, step_s=0.1, expected=expected)

    @pytest.mark.parametrize(("forgone_s", "go"), [(0.0, False), (9.9, False), (10.1, True), (99.0, True)])
    def test_it_goes_once_they_have_forgone_what_is_missing(self, forgone_s: float, go: bool) -> None:
        assert self.decided(forgone_s).go is go  # saves 20 s of 30 s

    def test_the_reason_names_them(self) -> None:
        assert self.decided(12.0).reason == (
            "worth it for the runs to come: 1,000 steps of 100 ms are left, at an assumed speed-up of 1.25x "
            "compiling saves about 20.0 s and costs about 30 s; earlier runs that declined would have saved "
            "12.0 s"
        )

    def test_no_run_becomes_much_longer_for_others(self) -> None:
        assert not self.decided(1e6, steps=700).go  # 14 s of 70 s are saved, 16 s are lent
        assert self.decided(1e6, steps=760).go

    def test_what_slows_down_is_not_compiled_for_any_others_either(self) -> None:
        assert not self.decided(1e6, speedup=0.9).go

    def test_nor_is_what_would_not_be_done_in_time(self) -> None:
        expected = Expectation(compile_s=120.0, speedup=2.0, child=Child(seconds=120.0), forgone_s=1e6)
        assert not forecast(remaining_steps=1000, step_s=0.1, expected=expected).go

    def lent(self, *, steps: int, is_lasting: bool = True) -> Decision:
        expected = Expectation(compile_s=30.0, speedup=1.25, is_lasting=is_lasting)
        return forecast(remaining_steps=steps, step_s=0.1, expected=expected)

    @pytest.mark.parametrize(("steps", "go"), [(1190, False), (1210, True)])
    def test_a_first_run_lends_a_twentieth_to_those_after_it(self, steps: int, go: bool) -> None:
        assert self.lent(steps=steps).go is go  # 24 s are saved, 6 s of 120 s are lent

    def test_its_reason_says_what_one_more_run_would_save(self) -> None:
        assert self.lent(steps=1210).reason == (
            "worth it for the runs to come: 1,210 steps of 100 ms are left, at an assumed speed-up of 1.25x "
            "compiling saves about 24.2 s and costs about 30 s; one more run like this would save 19.7 s"
        )

    def test_it_lends_nothing_where_the_code_would_be_lost(self) -> None:
        assert not self.lent(steps=1210, is_lasting=False).go

    def test_it_lends_no_more_than_one_more_run_would_save(self) -> None:
        slow = Expectation(compile_s=4.3, speedup=1.01, is_lasting=True)
        assert not forecast(remaining_steps=1000, step_s=0.1, expected=slow).go  # 1 s saved, 3.3 s lent
        assert forecast(remaining_steps=1000, step_s=0.1, expected=replace(slow, speedup=1.03)).go

    @pytest.mark.parametrize(("child_s", "inline"), [(110.0, False), (130.0, True)])
    def test_no_child_is_started_that_would_not_be_done_in_time(self, child_s: float, inline: bool) -> None:
        slow = Expectation(compile_s=30.0, speedup=1.25, is_lasting=True, child=Child(seconds=child_s))
        late = forecast(remaining_steps=1210, step_s=0.1, expected=slow)  # 121 s are left
        assert late.go
        assert late.inline is inline
        alone = forecast(remaining_steps=1210, step_s=0.1, expected=slow, or_inline=False)
        assert alone.go is not inline

    def test_it_does_not_lend_to_a_child_where_the_step_itself_would_pay(self) -> None:
        slow = Expectation(compile_s=24.0, speedup=1.25, is_lasting=True, child=Child(seconds=110.0))
        assert forecast(remaining_steps=1210, step_s=0.1, expected=slow).inline

    def test_a_run_forgoes_what_it_would_save_with_full_caches(self) -> None:
        assert forgone_s(100.0, expect(20.0, 1.25)) == pytest.approx(20.0 - WARM_SHARE * 20.0)
        assert forgone_s(5.0, expect(20.0, 1.25)) == 0.0
        assert forgone_s(100.0, expect(20.0, 0.9)) == 0.0

    def test_what_the_first_flip_of_a_process_takes_more_is_paid_in_each(self) -> None:
        first = Expectation(compile_s=20.0, speedup=1.25, start_s=5.0)
        assert first.cost_s == 25.0
        assert replace(first, child=Child(seconds=60.0)).cost_s == 5.0 + WARM_SHARE * 20.0
        assert forgone_s(100.0, first) == pytest.approx(15.0 - WARM_SHARE * 20.0)


def test_a_child_process_that_would_not_be_done_in_time_is_named() -> None:
    ahead = Expectation(compile_s=20.0, speedup=1.5, child=Child(seconds=20.0, slowed=0.1))
    assert forecast(remaining_steps=199, step_s=0.1, expected=ahead).reason == (
        "not worth it: 199 steps of 100 ms are left, in all 19.9 s, and a child process would compile for "
        "about 20 s"
    )


class TestOneKindAmongOthers:
    """Every other step is of this kind."""

    half = replace(expect(22.0, 1.25), share=0.5)

    def test_it_saves_in_its_own_steps_only_and_says_so(self) -> None:
        decision = forecast(remaining_steps=10_000, step_s=0.05, expected=self.half)
        assert decision.expected_saving_s == pytest.approx(50.0)
        assert decision.reason == (
            "worth it: 5,000 steps of this kind, 50 ms each, are left, at an assumed speed-up of 1.25x "
            "compiling saves about 50.0 s and costs about 22 s"
        )

    @pytest.mark.parametrize(("steps", "go"), [(4_500, True), (4_300, False)])
    def test_it_goes_if_these_pay(self, steps: int, go: bool) -> None:
        assert forecast(remaining_steps=steps, step_s=0.05, expected=self.half).go is go

    @pytest.mark.parametrize(("spent_s", "go"), [(44.5, True), (43.5, False)])
    def test_in_a_run_of_unknown_length_it_waits_until_these_have_taken_as_long(
        self, spent_s: float, go: bool
    ) -> None:
        decision = forecast(remaining_steps=None, step_s=0.05, expected=self.half, spent_s=spent_s)
        assert decision.go is go
        assert "s in steps of this kind, compiling costs about 22 s" in decision.reason

    def test_a_child_process_keeps_these_waiting_for_as_long_as_all_others(self) -> None:
        expected = replace(self.half, child=Child(seconds=400.0))
        decision = forecast(remaining_steps=10_000, step_s=0.05, expected=expected, or_inline=False)
        assert decision.expected_saving_s == pytest.approx(10.0)

    def test_one_more_run_like_it_would_save_in_these_only(self) -> None:
        expected = replace(expect(10.0, 1.25), is_lasting=True, share=0.5)
        decision = forecast(remaining_steps=1_900, step_s=0.05, expected=expected)
        assert decision.go
        assert "one more run like this would save 8.0 s" in decision.reason


def test_even_is_not_enough() -> None:
    assert not forecast(remaining_steps=100, step_s=1.0, expected=expect(50.0, 2.0)).go


def test_what_is_compiled_already_costs_nothing_more() -> None:
    assert forecast(remaining_steps=1, step_s=0.01, expected=expect(0.0, SOME)).go
    assert not forecast(remaining_steps=0, step_s=0.01, expected=expect(0.0, SOME)).go


def test_an_expected_slowdown_is_declined() -> None:
    decision = forecast(remaining_steps=100, step_s=0.1, expected=expect(1.0, 0.8))
    assert not decision.go
    assert decision.expected_saving_s is not None
    assert decision.expected_saving_s < 0


def test_a_trial_that_costs_next_to_nothing_is_made_whatever_other_models_have_gained() -> None:
    decision = forecast(remaining_steps=10**6, step_s=0.1, expected=expect(1.0, 0.8))
    assert decision.go
    assert "worth finding out, since it costs less than 1% of what is left" in decision.reason


def test_a_measured_slowdown_is_not_tried_again() -> None:
    expected = Expectation(compile_s=1.0, speedup=0.8, measured=True)
    assert not forecast(remaining_steps=10**6, step_s=0.1, expected=expected).go


@pytest.mark.parametrize(("spent_s", "go"), [(0.0, False), (21.9, False), (22.0, True), (500.0, True)])
def test_a_run_of_unknown_length_rents_until_it_has_paid_the_price(spent_s: float, go: bool) -> None:
    expected = expect(22.0, SOME)
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


def test_who_waits_asks_again_halfway_and_after_some_steps_at_the_latest() -> None:
    """Asking takes longer than a short step may; a long one must not keep the answer back."""
    for spent_s, step_s, again_in in [(0.0, 0.001, MOST_UNASKED), (0.0, 1.0, 11), (21.0, 0.05, 10)]:
        decision = forecast(remaining_steps=None, step_s=step_s, expected=expect(22.0, SOME), spent_s=spent_s)
        assert (decision.wait, decision.again_in) == (True, again_in)
    for now in ({"spent_s": 30.0, "remaining_steps": None}, {"remaining_steps": 10}, {"step_s": None}):
        given = {"remaining_steps": None, "step_s": 0.05, "expected": expect(22.0, SOME), **now}
        assert forecast(**given).again_in == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("remaining", [None, 5])
def test_nothing_measured_yet_waits(remaining: int | None) -> None:
    decision = forecast(remaining_steps=remaining, step_s=None, expected=expect(22.0, SOME))
    assert (decision.go, decision.wait) == (False, True)
    assert decision.reason == "waits until a step was measured"


def test_numbers_read_well() -> None:
    reason = forecast(remaining_steps=1_234_567, step_s=1.23456e-3, expected=expect(12.345, SOME)).reason
    assert re.search(r"1,234,567 steps of 1\.23 ms", reason)
    assert reason.endswith("costs about 12 s")


def test_a_decision_has_its_reason() -> None:
    with pytest.raises(TypeError):
        Decision(go=True)  # type: ignore[call-arg]


def test_the_expected_speed_up_depends_on_what_is_compiled_and_on_the_step() -> None:
    whole, ops = regions("step", "optimizer"), OpStatistics(fusible=300, batch_norm=0)
    assert expected_speedup(whole, 0.01, ops) == PRIOR["step+optimizer"].speedup(0.01, ops)
    assert expected_speedup(regions("step"), 0.01, ops) == PRIOR["step+fused"].speedup(0.01, ops)
    assert expected_speedup(regions("step"), 0.01, ops, fused=False) == PRIOR["step"].speedup(0.01, ops)
    assert expected_speedup(regions("group", "module"), 0.01) == PRIOR["regions+optimizer"].speedup(0.01)
    assert expected_speedup(whole, 0.001) < 1 < expected_speedup(whole, 0.02)


class TestOneMore:
    def decide(self, **changes: object) -> Decision:
        given = {
            "plan": "module",
            "remaining_steps": 100_000,
            "step_s": 0.01,
            "cost_s": 30.0,
            "spent_s": 1.0,
        }
        return worth_one_more(**{**given, **changes})  # type: ignore[arg-type]

    def test_in_a_long_run_and_says_why(self) -> None:
        decision = self.decide()
        assert decision.go
        assert decision.expected_saving_s == pytest.approx(1000 * (1 - 1 / GAIN_OF_ONE_MORE))
        assert decision.reason == (
            "one more plan is tried: scope module costs about 30 s to compile, and if it gains 5% it saves "
            "48 s in what is left"
        )

    def test_not_in_a_shorter_one(self) -> None:
        decision = self.decide(remaining_steps=50_000)
        assert not decision.go
        assert decision.reason.startswith("no other plan is tried: ")

    def test_of_unknown_length_once_the_run_has_taken_long_enough(self) -> None:
        assert not self.decide(remaining_steps=None, spent_s=600.0).go
        assert self.decide(remaining_steps=None, spent_s=700.0).go


def test_a_measured_speed_up_is_called_so() -> None:
    expected = Expectation(compile_s=2.0, speedup=1.5, measured=True)
    decision = forecast(remaining_steps=1000, step_s=0.1, expected=expected)
    assert "at the measured speed-up of 1.50x" in decision.reason
