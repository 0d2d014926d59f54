"""The state machine: facts in, next state and action with its reason out. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.watch.stats import Ratio

MOST_OF_A_PART = 1.25
"""So much faster a step may become without one part; what is slower than that is taken back at once."""

TOO_SLOW = ", below min_speedup="
"""In the reason of what was taken back for its speed, and in no other."""


class Phase(str, enum.Enum):
    """Where one step signature stands."""

    OBSERVING = "observing"
    PREWARMING = "prewarming"
    FLIPPING = "flipping"
    SETTLING = "settling"
    REFINING = "refining"
    STEADY = "steady"
    DECLINED = "declined"
    REVERTED = "reverted"

    def __str__(self) -> str:
        return self.value

    @property
    def uses_compiled_code(self) -> bool:
        """Whether steps in this phase may run compiled code."""
        return self in (Phase.FLIPPING, Phase.SETTLING, Phase.REFINING, Phase.STEADY)

    @property
    def is_at_work(self) -> bool:
        """Whether something is compiled or compared in this phase."""
        return self in (Phase.PREWARMING, Phase.FLIPPING, Phase.SETTLING, Phase.REFINING)


class Action(enum.Enum):
    """What the callback has to do at a transition."""

    NONE = "none"
    PREWARM = "prewarm"
    CANCEL = "cancel"
    INSTALL = "install"
    DROP_PART = "drop part"
    TAKE_OUT = "take out"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known at the start of a step.

    ``tries_besides`` is true while something else is on trial: what pays is compiled after that.

    ``prewarm`` is ``off``, ``wanted``, ``later``, ``running`` or ``over``: whether a child process fills the
    compiler's cache first; ``later`` if the step that is about to run would not show it all of the plan.

    ``failure`` says why compiled code cannot be used any longer; ``retry`` whether another attempt
    could succeed. ``compiled_steps`` counts steps in which compiled code ran since the flip.

    ``ratio`` is eager time / compiled time while settling; while refining it is the time without the part
    that is tried / the time with it. ``part`` is the one that can be tried in this way.
    """

    hot: bool = False
    decision: Decision | None = None
    tries_besides: bool = False
    prewarm: str = "off"
    compiled_steps: int = 0
    failure: str | None = None
    retry: bool = False
    ratio: Ratio | None = None
    settling_is_over: bool = False
    part: str | None = None
    min_speedup: float = 1.02
    max_flips: int = 3


@dataclass(frozen=True, kw_only=True)
class State:
    """A phase, why it was entered, and how often this signature was compiled.

    While refining, ``trying`` is the part that is tried, and ``outcome`` is what follows if it helps. A
    plan is refined once.
    """

    phase: Phase = Phase.OBSERVING
    reason: str = "training runs eagerly until a step has come back often enough"
    flips: int = 0
    may_retry: bool = False
    trying: str | None = None
    outcome: Transition | None = None
    refined: bool = False


@dataclass(frozen=True)
class Transition:
    """The next state and what to do now."""

    state: State
    action: Action = Action.NONE


def advance(state: State, facts: Facts) -> Transition:
    """The next state of one step signature.

    ``observing -> (prewarming) -> flipping -> settling -> (refining) -> steady``, and ``declined`` or
    ``reverted`` from any of them. A state that stays is returned unchanged.
    """
    return _RULES[state.phase](state, facts)


_WAITS = ("later", "running")


def _observing(state: State, facts: Facts) -> Transition:
    if not facts.hot or facts.decision is None or facts.decision.wait:
        return Transition(state)
    if not facts.decision.go:
        return Transition(_to(state, Phase.DECLINED, facts.decision.reason))
    if facts.tries_besides or facts.prewarm in _WAITS:  # the child of another step has a part of the cores
        return Transition(state)
    if facts.prewarm == "wanted":
        prewarming = _to(state, Phase.PREWARMING, facts.decision.reason)
        return Transition(prewarming, Action.PREWARM)
    return _begin_flip(state, facts.decision.reason)


def _prewarming(state: State, facts: Facts) -> Transition:
    if facts.prewarm == "wanted":  # where the ranks have agreed on it, the one with a child begins now
        return Transition(state, Action.PREWARM)
    dear = facts.decision  # the child may take longer than was expected, and more from the training
    if dear is not None and not dear.go and not dear.wait:
        action = Action.CANCEL if facts.prewarm == "running" else Action.NONE
        return Transition(_to(state, Phase.DECLINED, dear.reason), action)
    if facts.prewarm in _WAITS:
        return Transition(state)
    return _begin_flip(state, state.reason)


def _begin_flip(state: State, reason: str) -> Transition:
    flipping = replace(_to(state, Phase.FLIPPING, reason), flips=state.flips + 1)
    return Transition(flipping, Action.INSTALL)


def _flipping(state: State, facts: Facts) -> Transition:
    if facts.failure is not None:
        return _revert(state, facts)
    if facts.compiled_steps < 1:
        return Transition(state)
    return Transition(_to(state, Phase.SETTLING, "compiled code ran and is timed against eager steps"))


def _settling(state: State, facts: Facts) -> Transition:
    if facts.failure is not None:
        return _revert(state, facts)
    ratio = facts.ratio
    if ratio is None:
        if facts.settling_is_over:
            return Transition(_to(state, Phase.STEADY, "kept unmeasured: no interleaved steps to compare"))
        return Transition(state)
    if ratio.low >= facts.min_speedup:
        return _refined_first(state, facts, Transition(_to(state, Phase.STEADY, f"{ratio.verdict}: {ratio}")))
    if ratio.high < facts.min_speedup:
        return _refined_first(state, facts, _too_slow(state, facts, ratio))
    if not facts.settling_is_over:
        return Transition(state)
    if ratio.value >= facts.min_speedup:
        kept = _to(state, Phase.STEADY, f"{ratio.verdict}: {ratio}, kept")
        return _refined_first(state, facts, Transition(kept))
    return _refined_first(state, facts, _too_slow(state, facts, ratio))


def _refined_first(state: State, facts: Facts, outcome: Transition) -> Transition:
    """A plan is tried with and without its part before its outcome counts."""
    hopeless = facts.ratio is not None and facts.ratio.high * MOST_OF_A_PART < facts.min_speedup
    if state.refined or hopeless or facts.part is None:
        return outcome
    outcome = replace(outcome, state=replace(outcome.state, refined=True))
    reason = f"{facts.ratio} as a whole; now with and without {facts.part}"
    refining = replace(_to(state, Phase.REFINING, reason), trying=facts.part, outcome=outcome, refined=True)
    return Transition(refining)


def _refining(state: State, facts: Facts) -> Transition:
    if facts.failure is not None:
        return _revert(state, facts)
    ratio = facts.ratio
    # Where it stays undecided, the better guess: by then the choice costs nothing.
    if ratio is not None and (ratio.value if facts.settling_is_over else ratio.high) < 1:
        slower = f"a step is {1 / ratio.value:.2f}x faster if {state.trying} is not compiled"
        return Transition(_to(state, Phase.SETTLING, slower), Action.DROP_PART)
    helps = ratio is not None and ratio.low > 1
    if not helps and not facts.settling_is_over:
        return Transition(state)
    assert state.outcome is not None
    return state.outcome


def _steady(state: State, facts: Facts) -> Transition:
    return Transition(state) if facts.failure is None else _revert(state, facts)


def _declined(state: State, facts: Facts) -> Transition:
    return Transition(state)


def _reverted(state: State, facts: Facts) -> Transition:
    if not (facts.hot and state.may_retry and state.flips < facts.max_flips):
        return Transition(state)
    if facts.decision is None or not facts.decision.go or facts.tries_besides:
        return Transition(state)
    return _begin_flip(state, f"attempt {state.flips + 1} of {facts.max_flips}: {facts.decision.reason}")


def _revert(state: State, facts: Facts) -> Transition:
    assert facts.failure is not None
    may_retry = facts.retry and state.flips < facts.max_flips
    reverted = replace(_to(state, Phase.REVERTED, facts.failure), may_retry=may_retry)
    return Transition(reverted, Action.TAKE_OUT)


def _too_slow(state: State, facts: Facts, ratio: Ratio) -> Transition:
    reason = f"{ratio.verdict}: {ratio}{TOO_SLOW}{facts.min_speedup:g}"
    return Transition(_to(state, Phase.REVERTED, reason), Action.TAKE_OUT)


def _to(state: State, phase: Phase, reason: str) -> State:
    return replace(state, phase=phase, reason=reason, may_retry=False, trying=None, outcome=None)


_RULES = {
    Phase.OBSERVING: _observing,
    Phase.PREWARMING: _prewarming,
    Phase.FLIPPING: _flipping,
    Phase.SETTLING: _settling,
    Phase.REFINING: _refining,
    Phase.STEADY: _steady,
    Phase.DECLINED: _declined,
    Phase.REVERTED: _reverted,
}
