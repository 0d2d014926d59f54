"""Plans of one fit, one after the other: the first by rule, others where they may pay; the best is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.judge import Judge
from lightning_hotcompile.run.memory import Memory
from lightning_hotcompile.run.moves import Moves
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.swap.installation import OPTIMIZER
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.step_record import PairedUnits

CLEARLY_BETTER = 1.01
"""A later plan has to be so much faster than the best one before it; equal ones are not exchanged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One plan, and all that is there to carry it out."""

    plan: CompilePlan
    flip: Flip
    weighing: Weighing
    judge: Judge
    moves: Moves


@dataclass(frozen=True, kw_only=True)
class _Result:
    """How a signature stood at the end of a round."""

    round: Round
    state: State
    pairs: PairedUnits

    @property
    def speedup(self) -> float:
        """Eager time / compiled time, 1 where eager is what is left of the plan."""
        ratio = self.pairs.ratio()
        return ratio.value if self.state.phase is Phase.STEADY and ratio is not None else 1.0


class Rounds:
    """Tries plans one after the other, as long as it may pay. Each is measured against eager.

    Args:
        first: the plan by rule.
        make: a round for a plan; with a decision it is not asked whether it pays.
        others: the plans that can be tried, the first one too; asked for when they are needed.
        may_spare: whether the optimizers may stay eager where their compile would not pay.
        memory: knows what an earlier run has chosen and tried.
        ledger: told whose pairs count.
        story: told of each plan that is kept or left.
    """

    def __init__(
        self,
        first: CompilePlan,
        make: Callable[[CompilePlan, Decision | None], Round],
        others: Callable[[], Sequence[CompilePlan]],
        memory: Memory,
        ledger: Ledger,
        story: Story,
        *,
        may_spare: bool = False,
    ) -> None:
        self.now = make(first, None)
        self._lean = first.without_optimizers() if may_spare else None
        self._was_weighed = False
        self._make = make
        self._others = others
        self._memory = memory
        self._ledger = ledger
        self._story = story
        self._best: _Result | None = None
        self._track: Track | None = None
        """The signature on which plans are tried; others use the plan that is in place."""

        self._flips = [self.now.flip]
        self.tried: dict[str, float] = {}
        """Speed-up of each plan that was measured, by name and in order; 1 for one that was taken back."""

    def close(self) -> None:
        """Change everything back; a round that has not ended leaves the word to the best one before it."""
        for flip in self._flips:
            flip.end()
        if self._is_trial and self._best is not None and self._track is not None:
            self._ledger.end_round()
            self._take_up(self._best, self._track, self._best.state.reason)
            self._tell_of(self._track)

    @property
    def compile_s(self) -> float:
        """Seconds of compiling in all rounds."""
        return sum(flip.installation.timer.seconds for flip in self._flips)

    def compiled_runs(self, region: str) -> int:
        """Runs of a region's compiled code in all rounds."""
        return sum(flip.installation.witness.runs_of(region) for flip in self._flips)

    def move(self, track: Track, steps: int) -> None:
        """At most one transition of this signature, and the next round if that was the end of one."""
        before = track.state.phase
        if self._best is None:
            if before is Phase.OBSERVING and not track.is_waiting and self._begin(track):
                return  # the other plan knows nothing yet of the batch of this step
        elif self._is_trial and track is not self._track:
            if not track.hot:
                return
            self._abandon_trial()  # another signature needs a plan that is known to be good
        self.now.moves.move(track, steps)
        now = track.state.phase
        if now is not before and now in (Phase.STEADY, Phase.REVERTED):
            self._end_round(track)

    def _begin(self, track: Track) -> bool:
        """Whether this signature begins with another plan than the one by rule, from its next step on."""
        if self._has_begun:
            return False
        known = self._memory.of(track.signature)
        begins = (
            self._first_of(track) if known is None or known.verdict == "bad" else self._known(known.scope)
        )
        if begins is not None:
            self._go_to(begins)
        return begins is not None

    def _known(self, name: str) -> Round | None:
        """The plan that an earlier run has begun with, or found to be the best."""
        if name == self.now.plan.name:
            return None
        plans = [*([self._lean] if self._lean is not None else ()), *self._others()]
        chosen = next((plan for plan in plans if plan.name == name), None)
        return None if chosen is None else self._make(chosen, None)

    def _first_of(self, track: Track) -> Round | None:
        """The plan without its optimizers, if that is expected to leave the run shorter; asked once."""
        if self._lean is None or self._was_weighed or not track.hot:
            return None
        if not self.now.weighing.may_pay(self._lean):
            return None
        whole = self.now.weighing.weighed(track)
        if whole is None or whole.net_s is None:
            return None
        self._was_weighed = True
        round_ = self._make(self._lean, None)
        lean = round_.weighing.weighed(track)
        if lean is None or lean.net_s is None or not lean.expected_saving_s:
            return None
        return round_ if (lean.go, lean.net_s) > (whole.go, whole.net_s) else None

    @property
    def _has_begun(self) -> bool:
        """Whether the first plan is in use, be it by another signature, or has been left."""
        flip = self.now.flip
        return len(self._flips) > 1 or flip.in_place or flip.ahead.prewarm is not None

    @property
    def _is_trial(self) -> bool:
        return self._best is not None and self.now is not self._best.round

    def _abandon_trial(self) -> None:
        assert self._best is not None
        assert self._track is not None
        self._ledger.end_round()
        self.now.flip.take_out()
        self._take_up(self._best, self._track, self._best.state.reason)
        self.now.flip.go_on()
        self._tell_of(self._track)

    def _end_round(self, track: Track) -> None:
        self._track = self._track or track
        if track is not self._track:
            return
        result = _Result(round=self.now, state=track.state, pairs=track.pairs)
        self.tried[self.now.plan.name] = result.speedup
        best = self._best
        if best is not None and best.round is self.now:
            self._best = result  # what was kept has failed since
            return
        if best is None and track.state.may_retry:
            return
        self._ledger.end_round()
        if best is None or _is_better(result, best):
            self._best = result
        else:
            self._return_to(best, track, result)
        if not self.now.judge.may_try_others(track):
            return
        self.now.flip.pause()  # what is in place would look like the user's own wrappers to a planner
        if not self._begin_another(track):
            self.now.flip.go_on()

    def _return_to(self, best: _Result, track: Track, worse: _Result) -> None:
        self.now.flip.take_out()
        tried = f"scope {worse.round.plan.name} was tried: {worse.speedup:.2f}x"
        if _were_compared(worse, best):  # and not by their ratios, each to eager steps of its own
            tried += ", but no faster than this one when they took turns"
        self._take_up(best, track, f"{best.state.reason}; {tried}")
        self.now.flip.go_on()
        self._tell_of(track)

    def _tell_of(self, track: Track) -> None:
        self._story.entered(str(track.phase), track.state.reason)

    def _take_up(self, best: _Result, track: Track, reason: str) -> None:
        self.now = best.round
        track.state = replace(best.state, reason=reason, flips=max(best.state.flips, track.state.flips))
        track.pairs = self._ledger.pairs = best.pairs
        track.forget_misses()  # those of the plan that was tried

    def _begin_another(self, track: Track) -> bool:
        known = self._memory.of(track.signature)
        tried = {*self.tried, *(known.tried if known is not None else ())}
        for plan in self._others():
            if plan.name in tried or not self._is_candidate(plan):
                continue
            decision = self.now.weighing.worth_another(plan, track)
            if decision.go:
                self._go_to(self._make(plan, decision))
                track.begin_another_round(decision.reason)
                self._story.entered(str(track.phase), decision.reason)
                return True
        return False

    def _is_candidate(self, plan: CompilePlan) -> bool:
        """Modes, and compiled optimizers for fused ones, are tried on what is kept, if anything helps."""
        if self._best is None or (plan.mode is None and not plan.adds_optimizers):
            return plan.mode is None
        kept, is_kept = self._best.round.plan, self._best.state.phase is Phase.STEADY
        if plan.adds_optimizers:
            return is_kept and plan.is_more_than(kept)
        return is_kept and replace(plan, mode=None).name == kept.name

    def _go_to(self, following: Round) -> None:
        self.now = following
        self._flips.append(following.flip)


def _is_better(result: _Result, best: _Result) -> bool:
    """Whether a later plan takes the place of the best one before it.

    One that is the same with more optimizers has to have been held against it directly.
    """
    if _is_more(result, best):
        return _were_compared(result, best) and OPTIMIZER in result.round.flip.installation.parts
    return result.speedup > best.speedup * CLEARLY_BETTER


def _is_more(result: _Result, best: _Result) -> bool:
    """Whether it is the same with more optimizers, and both are in use."""
    are_in_use = result.state.phase is best.state.phase is Phase.STEADY
    return are_in_use and result.round.plan.is_more_than(best.round.plan)


def _were_compared(result: _Result, best: _Result) -> bool:
    """Whether steps with and without these optimizers took turns, while the plan was refined."""
    return result.state.refined and _is_more(result, best)
