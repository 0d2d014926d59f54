"""Plans of one fit, one after the other: the first by rule, others where they may pay; the best is kept."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cached_property

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.preflight import other_plans
from lightning_hotcompile.run.race import Race
from lightning_hotcompile.run.round import Result, Round
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.swap.onlookers import HOOKS_ON_ALL_MODULES
from lightning_hotcompile.tracks import Track


class Rounds:
    """Tries plans one after the other, as long as it may pay. Each is measured against eager.

    Two that seem to be about as fast take turns then: see :class:`Race`.

    Args:
        context: of the stage.
        first: the plan by rule.
    """

    def __init__(self, context: StageContext, first: CompilePlan) -> None:
        self._context = context
        self._first = first
        self._memory = context.memory
        self._ledger = context.ledger
        self._story = context.story
        self.now = Round(context, first)
        config = context.config
        may_spare = config.compile_optimizer == "auto" and config.max_flips > 1 and config.min_speedup > 0
        self._lean = first.without_optimizers() if may_spare else None
        """The first plan with its optimizers left eager, where their compile may not pay."""

        self._was_weighed = False
        self._best: Result | None = None
        self._track: Track | None = None
        """The signature on which plans are tried; others use the plan that is in place."""

        self._race: Race | None = None
        self._flips = [self.now.flip]
        self.tried: dict[str, float] = {}
        """Speed-up of each plan that was measured, by name and in order; 1 for one that was taken back."""

        self.turns: list[str] = []
        """How it went where two of them took turns, in words."""

    @cached_property
    def _others(self) -> list[CompilePlan]:
        """The plans that can be tried, the first one too; made when they are needed."""
        context = self._context
        return other_plans(context.trainer, context.module, context.config, self._first)

    def close(self) -> None:
        """Change everything back; a round that has not ended leaves the word to the best one before it.

        Where one plan cannot be taken out the others are all the same, and then the error is raised.
        """
        with contextlib.ExitStack() as ends:
            if self._on_trial is not None and self._track is not None:
                ends.callback(self._leave_trial, self._track)
            for flip in reversed(self._flips):
                ends.callback(flip.end)

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
        elif self._on_trial is not None and self._track is not None and track is not self._track:
            if not track.hot or track.phase is Phase.DECLINED:
                return
            self._abandon_trial(self._track)  # another signature needs a plan that is known to be good
        elif self._race is not None:
            self._go_on_racing(self._race, track)
            return
        self.now.moves.move(track, steps)
        now = track.state.phase
        if now is Phase.DECLINED and self._on_trial is not None:
            self._abandon_trial(track)  # by its child process: what was kept before goes on
        elif now is not before and now in (Phase.STEADY, Phase.REVERTED):
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
        plans = [*([self._lean] if self._lean is not None else ()), *self._others]
        chosen = next((plan for plan in plans if plan.name == name), None)
        return None if chosen is None else Round(self._context, chosen)

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
        round_ = Round(self._context, self._lean)
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
    def _on_trial(self) -> Round | None:
        """What is not known to be better than the best one before it."""
        if self._best is None:
            return None
        tried = self.now if self._race is None else self._race.tried.round
        return None if tried is self._best.round else tried

    def _abandon_trial(self, track: Track) -> None:
        assert self._on_trial is not None
        self._on_trial.flip.take_out()
        self._leave_trial(track)
        self.now.flip.go_on()

    def _leave_trial(self, track: Track) -> None:
        assert self._best is not None
        race, self._race = self._race, None
        if race is not None:
            self.tried.pop(race.tried.name, None)  # a later run may try it again
        self._ledger.end_round(None if race is None else race.gain)
        self._take_up(self._best, track, self._best.state.reason)
        self._tell_of(track)

    def _end_round(self, track: Track) -> None:
        self._track = self._track or track
        if track is not self._track:
            return
        result = Result(round=self.now, state=track.state, pairs=track.pairs)
        self.tried[self.now.plan.name] = result.speedup
        best = self._best
        if best is not None and best.round is self.now:
            self._best = result  # what was kept has failed since
            return
        if best is None and track.state.may_retry:
            return
        self._ledger.end_round()
        if best is not None and result.is_about_as_fast_as(best):
            self._race = Race(best, result, track)
            self._tell_of(track)
            self._take_turn(self._race)
            return
        if best is None or result.is_better_than(best):
            self._best = result
        else:
            tried = f"scope {result.name} was tried: {result.speedup:.2f}x"
            if result.was_compared_with(best):  # and not by their ratios, each to eager steps of its own
                tried += ", but no faster than this one when they took turns"
            self._return_to(best, result, track, tried)
        self._try_another(track)

    def _go_on_racing(self, race: Race, track: Track) -> None:
        now = race.kept if self.now is race.kept.round else race.tried
        race.had_turn(now, ran=track.ran_compiled)
        failure = self.now.judge.failure(track) or race.misfit(now)
        if race.is_void or failure == HOOKS_ON_ALL_MODULES:
            self._abandon_trial(track)  # somebody keeps compiled code out: that says nothing of either plan
        elif failure is not None:
            self.tried[now.name] = 1.0
            self._end_race(race, race.other(now), track, f"scope {now.name} was tried: {failure}")
        elif (winner := race.winner()) is not None:
            if (ratio := race.ratio_of(winner)) is not None:
                self._story.raced(winner.name, race.other(winner).name, ratio)
            self._end_race(race, winner, track, race.in_words(winner))
        else:
            self._take_turn(race)

    def _take_turn(self, race: Race) -> None:
        following = race.next()
        if following is not self.now:
            self.now.flip.pause()
            self.now = following
            self.now.flip.go_on()

    def _end_race(self, race: Race, winner: Result, track: Track, how: str) -> None:
        loser = race.other(winner)
        self._race, self._best = None, winner
        self._ledger.end_round(race.gain)
        self.turns.append(how)
        self._return_to(winner, loser, track, how)
        self._try_another(track)

    def _try_another(self, track: Track) -> None:
        if not self.now.judge.may_try_others(track):
            return
        self.now.flip.pause()  # what is in place would look like the user's own wrappers to a planner
        if not self._begin_another(track):
            self.now.flip.go_on()

    def _return_to(self, best: Result, worse: Result, track: Track, tried: str) -> None:
        worse.round.flip.take_out()
        self._take_up(best, track, f"{best.state.reason}; {tried}")
        self.now.flip.go_on()
        self._tell_of(track)

    def _tell_of(self, track: Track) -> None:
        self._story.entered(str(track.phase), track.state.reason)

    def _take_up(self, best: Result, track: Track, reason: str) -> None:
        self.now = best.round
        track.state = replace(best.state, reason=reason, flips=max(best.state.flips, track.state.flips))
        track.pairs = self._ledger.pairs = best.pairs
        track.forget_misses()  # those of the plan that was tried

    def _begin_another(self, track: Track) -> bool:
        known = self._memory.of(track.signature)
        tried = {*self.tried, *(known.tried if known is not None else ())}
        for plan in self._others:
            if plan.name in tried or not self._is_candidate(plan):
                continue
            decision = self.now.weighing.worth_another(plan, track)
            if decision.go:
                self._go_to(Round(self._context, plan, decision))
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
