"""Each state and each transition, fed with facts; no Trainer, no compile."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from lightning_hotcompile.machine import Action, Facts, Phase, State, Transition, advance
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.watch.stats import Ratio

GO = Decision(go=True, reason="worth it")
WAIT = Decision(go=False, wait=True, reason="not yet")
NO_GO = Decision(go=False, reason="not worth it: 50 steps are left")

ALLOWED = {
    Phase.OBSERVING: {Phase.PREWARMING, Phase.FLIPPING, Phase.DECLINED},
    Phase.PREWARMING: {Phase.FLIPPING, Phase.DECLINED},
    Phase.FLIPPING: {Phase.SETTLING, Phase.REVERTED},
    Phase.SETTLING: {Phase.REFINING, Phase.STEADY, Phase.REVERTED},
    Phase.REFINING: {Phase.SETTLING, Phase.STEADY, Phase.REVERTED},
    Phase.STEADY: {Phase.REVERTED},
    Phase.DECLINED: set(),
    Phase.REVERTED: {Phase.FLIPPING},
}


def ratio(low: float, value: float, high: float) -> Ratio:
    return Ratio(value=value, low=low, high=high, n=10, confidence=0.95)


FASTER = ratio(1.3, 1.4, 1.5)
SLOWER = ratio(0.7, 0.8, 0.9)
BARELY_FASTER = ratio(1.001, 1.005, 1.01)
UNSURE_UP = ratio(0.98, 1.05, 1.12)
UNSURE_DOWN = ratio(0.95, 1.0, 1.05)


def state(phase: Phase, **fields: Any) -> State:
    return State(phase=phase, reason="before", **fields)


KEPT = Transition(state(Phase.STEADY, flips=1, refined=True))
TOO_SLOW = Transition(state(Phase.REVERTED, flips=1, refined=True), Action.TAKE_OUT)


def refining(outcome: Transition = KEPT) -> State:
    return state(Phase.REFINING, flips=1, trying="optimizer", outcome=outcome, refined=True)


STAYS: list[tuple[str, State, Facts, Action]] = [
    ("not hot", state(Phase.OBSERVING), Facts(decision=GO), Action.NONE),
    ("hot, undecided", state(Phase.OBSERVING), Facts(hot=True), Action.NONE),
    ("nothing is known", state(Phase.OBSERVING), Facts(), Action.NONE),
    ("it waits", state(Phase.OBSERVING), Facts(hot=True, decision=WAIT), Action.NONE),
    ("agreed on, to be prewarmed", state(Phase.PREWARMING), Facts(prewarm="wanted"), Action.PREWARM),
    (
        "the child of another step runs",
        state(Phase.OBSERVING),
        Facts(hot=True, decision=GO, prewarm="running"),
        Action.NONE,
    ),
    ("the child runs", state(Phase.PREWARMING), Facts(prewarm="running"), Action.NONE),
    (
        "another batch for a child",
        state(Phase.OBSERVING),
        Facts(hot=True, decision=GO, prewarm="later"),
        Action.NONE,
    ),
    ("agreed on, another batch for it", state(Phase.PREWARMING), Facts(prewarm="later"), Action.NONE),
    ("in place, has not run", state(Phase.FLIPPING, flips=1), Facts(), Action.NONE),
    ("too few pairs", state(Phase.SETTLING, flips=1), Facts(compiled_steps=9), Action.NONE),
    ("unsure above", state(Phase.SETTLING, flips=1), Facts(ratio=UNSURE_UP), Action.NONE),
    ("unsure below", state(Phase.SETTLING, flips=1), Facts(ratio=UNSURE_DOWN), Action.NONE),
    ("a part, too few pairs", refining(), Facts(), Action.NONE),
    ("a part, unsure", refining(), Facts(ratio=UNSURE_UP), Action.NONE),
    ("a part, unsure below", refining(), Facts(ratio=UNSURE_DOWN), Action.NONE),
    ("steady", state(Phase.STEADY, flips=1), Facts(compiled_steps=99), Action.NONE),
    ("steady, measured late", state(Phase.STEADY, flips=1), Facts(ratio=SLOWER), Action.NONE),
    ("declined, hot", state(Phase.DECLINED), Facts(hot=True, decision=GO), Action.NONE),
    ("declined, failure", state(Phase.DECLINED), Facts(failure="x", retry=True), Action.NONE),
    ("reverted for good", state(Phase.REVERTED, flips=1), Facts(hot=True, decision=GO), Action.NONE),
    ("not hot again", state(Phase.REVERTED, flips=1, may_retry=True), Facts(decision=GO), Action.NONE),
    ("undecided", state(Phase.REVERTED, flips=1, may_retry=True), Facts(hot=True), Action.NONE),
    ("no go", state(Phase.REVERTED, flips=1, may_retry=True), Facts(hot=True, decision=NO_GO), Action.NONE),
    ("max_flips", state(Phase.REVERTED, flips=3, may_retry=True), Facts(hot=True, decision=GO), Action.NONE),
]


@pytest.mark.parametrize(("before", "facts", "action"), [c[1:] for c in STAYS], ids=[c[0] for c in STAYS])
def test_a_state_that_stays_is_returned_unchanged(before: State, facts: Facts, action: Action) -> None:
    transition = advance(before, facts)
    assert transition.state is before
    assert transition.action is action


MOVES: list[tuple[str, State, Facts, Phase, Action, str]] = [
    (
        "prewarm first",
        state(Phase.OBSERVING),
        Facts(hot=True, decision=GO, prewarm="wanted"),
        Phase.PREWARMING,
        Action.PREWARM,
        "worth it",
    ),
    (
        "the child is too dear",
        state(Phase.PREWARMING),
        Facts(prewarm="running", decision=NO_GO),
        Phase.DECLINED,
        Action.CANCEL,
        NO_GO.reason,
    ),
    (
        "prewarmed too late",
        state(Phase.PREWARMING),
        Facts(prewarm="over", decision=NO_GO),
        Phase.DECLINED,
        Action.NONE,
        NO_GO.reason,
    ),
    (
        "prewarmed",
        state(Phase.PREWARMING),
        Facts(prewarm="over"),
        Phase.FLIPPING,
        Action.INSTALL,
        "before",
    ),
    (
        "declined",
        state(Phase.OBSERVING),
        Facts(hot=True, decision=NO_GO),
        Phase.DECLINED,
        Action.NONE,
        NO_GO.reason,
    ),
    (
        "flips by a real step",
        state(Phase.OBSERVING),
        Facts(hot=True, decision=GO),
        Phase.FLIPPING,
        Action.INSTALL,
        GO.reason,
    ),
    (
        "compiled code ran",
        state(Phase.FLIPPING, flips=1),
        Facts(compiled_steps=1),
        Phase.SETTLING,
        Action.NONE,
        "compiled code ran",
    ),
    (
        "compile error",
        state(Phase.FLIPPING, flips=1),
        Facts(failure="BackendCompilerFailed"),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "BackendCompilerFailed",
    ),
    (
        "ran, and failed",
        state(Phase.FLIPPING, flips=1),
        Facts(compiled_steps=3, failure="x"),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "x",
    ),
    ("faster", state(Phase.SETTLING), Facts(ratio=FASTER), Phase.STEADY, Action.NONE, "faster: 1.40x"),
    ("slower", state(Phase.SETTLING), Facts(ratio=SLOWER), Phase.REVERTED, Action.TAKE_OUT, "slower: 0.80x"),
    (
        "faster, but not by min_speedup",
        state(Phase.SETTLING),
        Facts(ratio=BARELY_FASTER),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "below min_speedup=1.02",
    ),
    (
        "unsure to the end, above",
        state(Phase.SETTLING),
        Facts(ratio=UNSURE_UP, settling_is_over=True),
        Phase.STEADY,
        Action.NONE,
        "no difference: 1.05x [0.98, 1.12], kept",
    ),
    (
        "unsure to the end, below",
        state(Phase.SETTLING),
        Facts(ratio=UNSURE_DOWN, settling_is_over=True),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "no difference: 1.00x [0.95, 1.05], below min_speedup=1.02",
    ),
    (
        "nothing to compare",
        state(Phase.SETTLING),
        Facts(settling_is_over=True),
        Phase.STEADY,
        Action.NONE,
        "kept unmeasured",
    ),
    (
        "fails while settling",
        state(Phase.SETTLING),
        Facts(ratio=FASTER, failure="recompile storm"),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "recompile storm",
    ),
    (
        "faster, with a part to try",
        state(Phase.SETTLING),
        Facts(ratio=FASTER, part="optimizer"),
        Phase.REFINING,
        Action.NONE,
        "1.40x [1.30, 1.50] as a whole; now with and without optimizer",
    ),
    (
        "a part that slows the step down",
        refining(),
        Facts(ratio=SLOWER),
        Phase.SETTLING,
        Action.DROP_PART,
        "a step is 1.25x faster if optimizer is not compiled",
    ),
    ("a part helps", refining(), Facts(ratio=FASTER), Phase.STEADY, Action.NONE, "before"),
    (
        "a part that helps as far as can be told",
        refining(),
        Facts(ratio=UNSURE_UP, settling_is_over=True),
        Phase.STEADY,
        Action.NONE,
        "before",
    ),
    (
        "a part that slows the step down as far as can be told",
        refining(),
        Facts(ratio=ratio(0.96, 0.99, 1.02), settling_is_over=True),
        Phase.SETTLING,
        Action.DROP_PART,
        "a step is 1.01x faster if optimizer is not compiled",
    ),
    (
        "a part helps, and the whole is too slow",
        refining(TOO_SLOW),
        Facts(ratio=UNSURE_UP, settling_is_over=True),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "before",
    ),
    (
        "fails while refining",
        refining(),
        Facts(ratio=FASTER, failure="recompile storm"),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "recompile storm",
    ),
    (
        "fails in steady state",
        state(Phase.STEADY),
        Facts(failure="recompile storm"),
        Phase.REVERTED,
        Action.TAKE_OUT,
        "recompile storm",
    ),
    (
        "is tried again",
        state(Phase.REVERTED, flips=1, may_retry=True),
        Facts(hot=True, decision=GO),
        Phase.FLIPPING,
        Action.INSTALL,
        "attempt 2 of 3: worth it",
    ),
]


@pytest.mark.parametrize(
    ("before", "facts", "phase", "action", "reason"), [c[1:] for c in MOVES], ids=[c[0] for c in MOVES]
)
def test_a_transition_has_its_action_and_its_reason(
    before: State, facts: Facts, phase: Phase, action: Action, reason: str
) -> None:
    transition = advance(before, facts)
    assert transition.state.phase is phase
    assert transition.action is action
    assert reason in transition.state.reason
    assert phase in ALLOWED[before.phase]


def test_every_allowed_transition_is_tested_and_every_phase_is_reachable() -> None:
    tested = {(before.phase, phase) for _, before, _, phase, _, _ in MOVES}
    assert tested == {(before, after) for before, afters in ALLOWED.items() for after in afters}
    assert {after for _, after in tested} | {State().phase} == set(Phase)


def test_every_phase_can_stay() -> None:
    assert {before.phase for _, before, _, _ in STAYS} == set(Phase)


@pytest.mark.parametrize(
    ("low", "phase"), [(1.02, Phase.STEADY), (1.019999, Phase.SETTLING)], ids=["at", "just below"]
)
def test_min_speedup_itself_is_enough(low: float, phase: Phase) -> None:
    facts = Facts(ratio=ratio(low, 1.1, 1.2), min_speedup=1.02)
    assert advance(state(Phase.SETTLING), facts).state.phase is phase


def test_min_speedup_zero_keeps_all() -> None:
    facts = Facts(ratio=SLOWER, min_speedup=0)
    assert advance(state(Phase.SETTLING), facts).state.phase is Phase.STEADY


def test_where_a_part_helps_the_outcome_of_the_whole_counts() -> None:
    whole = Facts(ratio=FASTER, part="optimizer")
    trying = advance(state(Phase.SETTLING, flips=1), whole).state
    assert trying.trying == "optimizer"
    over = advance(trying, Facts(ratio=None, settling_is_over=True)).state
    assert (over.phase, over.trying, over.outcome) == (Phase.STEADY, None, None)
    assert over.reason == advance(state(Phase.SETTLING), Facts(ratio=FASTER)).state.reason


def test_a_plan_that_is_too_slow_as_a_whole_may_be_saved_by_leaving_its_part_out() -> None:
    trying = advance(state(Phase.SETTLING, flips=1), Facts(ratio=SLOWER, part="optimizer")).state
    again = advance(trying, Facts(ratio=SLOWER))
    assert (again.state.phase, again.action) == (Phase.SETTLING, Action.DROP_PART)
    kept = advance(again.state, Facts(ratio=FASTER))
    assert (kept.state.phase, kept.action) == (Phase.STEADY, Action.NONE)


def test_what_is_far_too_slow_is_taken_back_at_once() -> None:
    crawls = Facts(ratio=ratio(0.5, 0.6, 0.7), part="optimizer")
    assert advance(state(Phase.SETTLING), crawls).state.phase is Phase.REVERTED


def test_where_there_is_no_part_to_try_the_outcome_counts_at_once() -> None:
    assert advance(state(Phase.SETTLING), Facts(ratio=FASTER, part=None)).state.phase is Phase.STEADY


def test_a_plan_is_refined_once() -> None:
    again = state(Phase.SETTLING, refined=True)
    assert advance(again, Facts(ratio=FASTER, part="optimizer")).state.phase is Phase.STEADY


def test_flips_are_counted_when_they_begin_and_kept() -> None:
    flipping = advance(State(), Facts(hot=True, decision=GO)).state
    assert flipping.flips == 1
    reverted = advance(flipping, Facts(failure="x", retry=True)).state
    assert (reverted.flips, reverted.may_retry) == (1, True)
    again = advance(reverted, Facts(hot=True, decision=GO)).state
    assert (again.flips, again.may_retry) == (2, False)


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("phase", [p for p in Phase if p.uses_compiled_code])
def test_a_failure_is_tried_again_only_if_it_may(phase: Phase, retry: bool) -> None:
    assert advance(state(phase), Facts(failure="x", retry=retry)).state.may_retry is retry


def test_what_was_too_slow_is_not_tried_again() -> None:
    reverted = advance(state(Phase.SETTLING, flips=1), Facts(ratio=SLOWER, retry=True)).state
    assert not reverted.may_retry
    assert advance(reverted, Facts(hot=True, decision=GO)).state is reverted


def test_max_flips_bounds_the_attempts() -> None:
    now, attempts = State(), 0
    for _ in range(20):
        now = advance(now, Facts(hot=True, decision=GO, max_flips=3)).state
        if now.phase is Phase.FLIPPING:
            attempts += 1
            now = advance(now, Facts(failure="x", retry=True, max_flips=3)).state
    assert (attempts, now.phase, now.flips) == (3, Phase.REVERTED, 3)


@pytest.mark.parametrize(("flips", "may_retry"), [(1, True), (2, False), (3, False)])
def test_after_the_last_attempt_there_is_none_to_wait_for(flips: int, may_retry: bool) -> None:
    failed = Facts(failure="x", retry=True, max_flips=2)
    assert advance(state(Phase.STEADY, flips=flips), failed).state.may_retry is may_retry


def any_facts(rng: random.Random) -> Facts:
    return Facts(
        hot=rng.random() < 0.6,
        decision=rng.choice([None, GO, GO, NO_GO, WAIT]),
        prewarm=rng.choice(["off", "wanted", "later", "running", "over"]),
        compiled_steps=rng.choice([0, 1, 5]),
        failure=rng.choice([None, None, None, "failed"]),
        retry=rng.random() < 0.5,
        ratio=rng.choice([None, FASTER, SLOWER, BARELY_FASTER, UNSURE_UP, UNSURE_DOWN]),
        settling_is_over=rng.random() < 0.3,
        part=rng.choice([None, "optimizer"]),
        max_flips=rng.choice([1, 3]),
    )


def check(before: State, facts: Facts, transition: Transition) -> None:
    after, action = transition.state, transition.action
    if after.phase is before.phase:
        assert after is before
        assert action in (Action.NONE, Action.PREWARM if before.phase is Phase.PREWARMING else Action.NONE)
        return
    assert after.phase in ALLOWED[before.phase]
    assert after.reason
    assert after.flips == before.flips + (after.phase is Phase.FLIPPING)
    assert (action is Action.TAKE_OUT) == (before.phase.uses_compiled_code and after.phase is Phase.REVERTED)
    assert (action is Action.INSTALL) <= (after.phase is Phase.FLIPPING)
    assert (action is Action.PREWARM) <= (after.phase is Phase.PREWARMING)
    assert (action is Action.NONE) <= (after.phase not in (Phase.PREWARMING, Phase.FLIPPING))
    dropped = before.phase is Phase.REFINING and after.phase is Phase.SETTLING
    assert (action is Action.DROP_PART) == dropped
    assert (after.trying is not None) == (after.outcome is not None) == (after.phase is Phase.REFINING)


@pytest.mark.parametrize("seed", range(20))
def test_random_facts_never_leave_the_allowed_transitions(seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for _ in range(100):
        now = State()
        for _ in range(30):
            facts = any_facts(rng)
            transition = advance(now, facts)
            check(now, facts, transition)
            assert advance(now, facts) == transition  # pure: the same answer again
            now = transition.state
            seen.add(now.phase)
    assert seen == set(Phase)


def test_values_are_frozen_and_read_well() -> None:
    for value in (State(), Facts(), Transition(State())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.phase = Phase.STEADY  # type: ignore[union-attr, misc]
    assert f"{Phase.STEADY}" == str(Phase.STEADY) == "steady"
    assert [str(p) for p in Phase] == [p.value for p in Phase]


def test_a_run_as_it_should_be() -> None:
    now = advance(State(), Facts(hot=True, decision=GO))
    assert now.action is Action.INSTALL
    now = advance(now.state, Facts(compiled_steps=1))
    now = advance(now.state, Facts(compiled_steps=20, ratio=FASTER))
    assert now == Transition(State(phase=Phase.STEADY, reason="faster: 1.40x [1.30, 1.50]", flips=1))
