"""Carries out what the machine says: one transition of a signature, alone or together with other ranks."""

from __future__ import annotations

from dataclasses import replace

from lightning_hotcompile.machine import Action, Facts, Phase, State, Transition, advance
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.judge import Judge
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.swap.ranks import Proposal
from lightning_hotcompile.tracks import Track

_HAS_GONE = "its step has not come back on this rank"


class Moves:
    """Takes the facts from the judge and the decision from the state machine, and carries it out.

    Args:
        context: of the stage.
        plan: what is compiled.
        flip: changes the model.
        judge: knows the facts.
    """

    def __init__(self, context: StageContext, plan: CompilePlan, flip: Flip, judge: Judge) -> None:
        self._plan = plan
        self._flip = flip
        self._judge = judge
        self._watch = context.watch
        self._ledger = context.ledger
        self._story = context.story
        self._memory = context.memory
        self._together = context.together
        self._leader: Track | None = None

    def move(self, track: Track, steps: int) -> None:
        """At most one transition, before batch number ``steps``: of this signature, or of all ranks."""
        if self._together.several:
            self._move_together(track, steps)
        else:
            self._move(track)

    def _move(self, track: Track) -> None:
        facts = self._judge.facts(track)
        transition = advance(track.state, facts)
        if track.phase is Phase.OBSERVING and not facts.hot:
            track.is_unknown = self._memory.of(track.signature) is None
        if facts.decision is not None:
            track.asked_again_at = track.steps + facts.decision.again_in
        if facts.ratio is not None:
            track.looks += 1
        self._perform(track, transition, facts)

    def _move_together(self, track: Track, steps: int) -> None:
        """All ranks change at the same batch, or none does.

        One signature, the first that is hot on each rank, is compiled. In the steady state a rank may
        go back to eager by itself, since gradients are averaged; and while all wait for the child
        processes, those that have one show it what to compile.
        """
        together = self._together
        if together.state.phase is Phase.STEADY and self._leader is not None:
            if self._leader.phase is Phase.STEADY:  # back to eager alone, but never compiled again alone
                self._move(self._leader)
            return
        if together.state.phase is Phase.PREWARMING and track is self._leader:
            self._prewarm(track)
        if not together.is_due(steps):
            return
        leader = self._leader or self._watch.hot_one(track)
        facts = self._judge.facts(leader) if leader is not None else Facts()
        transition = advance(leader.state, facts) if leader is not None else Transition(together.state)
        if leader is not None and leader.phase.uses_compiled_code and self._watch.has_gone(leader):
            gone = replace(leader.state, phase=Phase.REVERTED, reason=_HAS_GONE)
            transition = Transition(gone, Action.TAKE_OUT)
        agreed = together.exchange(transition.state, steps)
        leader = leader or (self._watch.tracks.main() if agreed is not None else None)
        if leader is None:
            return
        if facts.ratio is not None and transition.state == leader.state:
            leader.looks += 1  # looked at and not decided; a decision waits for the others
        if agreed is None:
            return
        self._leader = leader
        self._perform_as_agreed(leader, transition, facts, agreed)
        self._wait_until_all_have_compiled(leader, transition.action, steps)

    def _prewarm(self, track: Track) -> None:
        facts = self._judge.facts(track)
        transition = advance(track.state, facts)
        if transition.action is Action.PREWARM:
            self._perform(track, transition, facts)

    def _perform_as_agreed(
        self, leader: Track, transition: Transition, facts: Facts, agreed: Proposal
    ) -> None:
        if agreed.phase != str(transition.state.phase):
            other = replace(leader.state, phase=Phase(agreed.phase), reason=agreed.reason)
            transition = Transition(other, Action.TAKE_OUT)
        if agreed.phase == str(Phase.PREWARMING):  # who has a child begins with the leader's next step
            transition = replace(transition, action=Action.NONE)
        self._perform(leader, transition, facts)
        self._together.state = leader.state

    def _wait_until_all_have_compiled(self, leader: Track, action: Action, steps: int) -> None:
        """A barrier with a time limit: a rank that could not put the plan in place tells the others."""
        if action is not Action.INSTALL or not self._together.compiling:
            return
        facts = self._judge.facts(leader)
        transition = advance(leader.state, facts)
        agreed = self._together.exchange(transition.state, steps, compiled=True)
        if agreed is not None:
            self._perform_as_agreed(leader, transition, facts, agreed)

    def _perform(self, track: Track, transition: Transition, facts: Facts) -> None:
        if transition.state == track.state and transition.action is Action.NONE:
            return
        before, track.state = track.state, transition.state
        if transition.action is Action.INSTALL and self._together.several:
            self._together.begin_compile()
        if track.phase is Phase.FLIPPING and before.phase is not Phase.FLIPPING:
            track.began_flip()
            self._ledger.pairs = self._watch.tracks.main_pairs
            self._story.planned(self._plan.name, self._plan.reason, len(self._plan.regions), str(self._plan))
        self._learn_from(track, before, transition.action, facts)
        if track.phase is not before.phase:
            track.began_comparing()
            self._story.entered(str(track.phase), track.state.reason)
            if track.phase is Phase.SETTLING:
                self._ledger.pairs = self._watch.tracks.main_pairs
        self._act(transition.action, track, before)

    def _learn_from(self, track: Track, before: State, action: Action, facts: Facts) -> None:
        """What the steps that were interleaved until now have shown."""
        if facts.ratio is not None and before.phase is Phase.SETTLING:
            self._story.measured(facts.ratio)
        elif facts.ratio is not None and before.trying is not None:
            kept = action is not Action.DROP_PART
            self._story.tried(before.trying, facts.ratio, kept=kept)

    def _act(self, action: Action, track: Track, before: State) -> None:
        if action in (Action.PREWARM, Action.INSTALL):
            self._memory.begin_compiling()
        if action is Action.PREWARM:
            self._flip.begin_prewarm()
        elif action is Action.CANCEL:
            self._flip.ahead.cancel()
        elif action is Action.INSTALL:
            self._flip.install(self._memory.eager_parts(track.signature, self._plan.name))
        elif action is Action.DROP_PART and before.trying is not None:
            self._flip.take_back(before.trying, track.state.reason)
        elif action is Action.TAKE_OUT:
            self._take_out(track)

    def _take_out(self, track: Track) -> None:
        self._watch.cool_down(track)
        if not self._watch.tracks.anyone_uses_compiled_code():
            self._flip.take_out()
