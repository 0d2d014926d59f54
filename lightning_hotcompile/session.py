"""One fit under the callback: feeds the machine with facts and does what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile import trainer_facts
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.flip import Flip
from lightning_hotcompile.judge import Judge
from lightning_hotcompile.machine import Action, Facts, Phase, State, Transition, advance
from lightning_hotcompile.memory import Memory
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.ledger import Ledger, StepRecord
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.stages import TRAIN, ends_unit
from lightning_hotcompile.step_watch import StepWatch
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.ranks import Proposal, Ranks
from lightning_hotcompile.together import Together
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.clock import StepClock


class Session:
    """Watches the steps of one fit and swaps the model when the machine says so.

    Args:
        trainer: of this fit.
        module: the LightningModule that is trained.
        config: the callback's options.
        plan: what is compiled once a step is hot.
        emit: receives each event.
        memory: what earlier runs have learned.
        stage: ``train``, ``validate``, ``test`` or ``predict``.
        now: a clock in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        config: HotCompileConfig,
        plan: CompilePlan,
        emit: Callable[[Event], None],
        memory: Memory,
        *,
        stage: str = TRAIN,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        ranks = Ranks(config.threshold, alone=stage != TRAIN or trainer.world_size == 1)
        config = replace(config, compile_timeout=ranks.within_timeout(config.compile_timeout))
        self._trainer = trainer
        self._stage = stage
        self._memory = memory
        self._now = now
        self.plan = plan
        self.ledger = Ledger()
        self.story = Story(emit, lambda: self.steps)
        self.watch = StepWatch(trainer, module, config, stage, self.story)
        self.flip = Flip(trainer, module, config, plan, self.ledger, self.story, now)
        self.judge = Judge(trainer, config, self.flip, self.watch, self.ledger, stage, memory)
        self.steps = 0
        self._together = Together(ranks, plan.digest)
        self._leader: Track | None = None
        self._clock = StepClock(device_type=trainer_facts.device_type(module), now=now)
        self._current: tuple[Track, StepRecord, Lane] | None = None
        self._gave_up: str | None = None

    def before_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Decide how the step that is about to run goes, and begin to time it."""
        start, installed_s = self._now(), self.ledger.install_s
        if self._current is not None:
            self.abandon_step()
        if self._gave_up is not None:
            self._together.answer_for(self._gave_up, self.steps)
            return
        self._book_finished_steps()
        track = self.watch.track_of(batch, batch_idx, dataloader_idx, self._is_at_rest)
        self.flip.batch.begin(batch, track.signature.batch)
        self.flip.end_capture()  # of the step before, whatever step this is
        if not self._is_at_rest(track):
            if self._together.several:
                self._move_together()
            else:
                self._move(track)
        lane = self.flip.lane(track.lane())
        record = StepRecord(phase=track.phase.value, compiled=lane is not Lane.EAGER)
        if track.phase is Phase.SETTLING:
            record.pairs = track.pairs
            record.disturbed = lane is Lane.COMPILE  # may compile, and is looked at for NaN
        if self.flip.is_tracing:
            record.disturbed = record.stalled = True
        self._current = (track, record, lane)
        self.flip.open(lane, armed=track.phase is not Phase.SETTLING or lane is Lane.COMPILE)
        self.watch.begin_recording(track, record)
        self.ledger.own_s += self._now() - start - (self.ledger.install_s - installed_s)
        self._clock.start(record)

    def after_step(self) -> None:
        """End the step: stop the clock, book what ran."""
        if self._current is None:
            self.steps += self._gave_up is not None
            return
        self._clock.stop()
        start = self._now()
        (track, record, lane), self._current = self._current, None
        self.watch.end_recording()
        self.steps += 1
        record.ends_unit = ends_unit(self._trainer, self._stage)
        ran, new_graphs = self.flip.close()
        record.stalled |= new_graphs
        record.compiled = lane is not Lane.EAGER and ran
        record.disturbed |= new_graphs or (lane is not Lane.EAGER and not ran)
        track.ran(lane=lane, compiled=ran, ends_unit=record.ends_unit)
        if not self._is_at_rest(track):
            self.watch.count(track, record)
        self.ledger.own_s += self._now() - start

    def _is_at_rest(self, track: Track) -> bool:
        """Whether nothing can change for this signature, so that its step need not be looked at."""
        at_rest = track.phase is Phase.STEADY or track.phase is Phase.DECLINED
        return at_rest and track.failure is None and not self.flip.has_news

    def abandon_step(self) -> None:
        """Leave a step that did not end (an exception, or an epoch that was cut short)."""
        self.watch.end_recording()
        if self._current is not None:
            self._current = None
            self._clock.abandon()
            self.flip.abandon_step()

    def pause(self) -> None:
        """Out of the model until :meth:`go_on`: another stage comes in between."""
        self.abandon_step()
        self._book_finished_steps()
        self.flip.pause()

    def go_on(self) -> None:
        """Back into the model, if it was in when paused."""
        self.flip.go_on()

    def finish(self) -> None:
        """Change everything back and close the books."""
        self.abandon_step()
        self._book_finished_steps()
        self.flip.take_out()

    def give_up(self, reason: str) -> None:
        """Stay eager from now on, but go on answering the other ranks: they would wait for ever."""
        self.finish()
        self._gave_up = reason
        for track in self.watch.tracks:
            if track.phase.uses_compiled_code:
                track.state = replace(track.state, phase=Phase.REVERTED, reason=reason)
        self._together.answer_for(reason, self.steps)

    def _book_finished_steps(self) -> None:
        for finished in self._clock.drain():
            assert isinstance(finished.tag, StepRecord)
            self.ledger.add(finished, finished.tag)

    def _move(self, track: Track) -> None:
        """At most one transition of this signature."""
        facts = self.judge.facts(track)
        transition = advance(track.state, facts)
        if facts.ratio is not None:
            track.looks += 1
        self._perform(track, transition, facts)

    def _move_together(self) -> None:
        """All ranks change at the same batch, or none does.

        One signature, the first that is hot on each rank, is compiled. In the steady state a rank may
        go back to eager by itself, since gradients are averaged.
        """
        together = self._together
        if together.state.phase is Phase.STEADY and self._leader is not None:
            if self._leader.phase is Phase.STEADY:  # back to eager alone, but never compiled again alone
                self._move(self._leader)
            return
        if not together.is_due(self.steps):
            return
        leader = self._leader or next((t for t in self.watch.tracks if t.hot), None)
        facts = self.judge.facts(leader) if leader is not None else Facts()
        transition = advance(leader.state, facts) if leader is not None else Transition(together.state)
        agreed = together.exchange(transition.state, self.steps)
        leader = leader or (self.watch.tracks.main() if agreed is not None else None)
        if leader is None:
            return
        if facts.ratio is not None and transition.state == leader.state:
            leader.looks += 1  # looked at and not decided; a decision waits for the others
        if agreed is None:
            # Within the flip an action need not change the phase: all ranks install at this batch.
            if together.state.phase is Phase.FLIPPING and transition.state.phase is Phase.FLIPPING:
                self._perform(leader, transition, facts)
                self._wait_until_all_have_compiled(leader, transition.action)
            return
        self._leader = leader
        self._perform_as_agreed(leader, transition, facts, agreed)
        self._wait_until_all_have_compiled(leader, transition.action)

    def _perform_as_agreed(
        self, leader: Track, transition: Transition, facts: Facts, agreed: Proposal
    ) -> None:
        if agreed.phase != str(transition.state.phase):
            ended = replace(leader.state, phase=Phase(agreed.phase), reason=agreed.reason)
            transition = Transition(ended, Action.TAKE_OUT)
        self._perform(leader, transition, facts)
        self._together.state = leader.state

    def _wait_until_all_have_compiled(self, leader: Track, action: Action) -> None:
        """A barrier with a time limit: no rank waits in a collective for one that still compiles."""
        if action is not Action.INSTALL or not self._together.compiling:
            return
        facts = self.judge.facts(leader)
        transition = advance(leader.state, facts)
        agreed = self._together.exchange(transition.state, self.steps, compiled=True)
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
            self.ledger.pairs = track.pairs
            self.story.planned(self.plan.scope, self.plan.reason, len(self.plan.regions), str(self.plan))
        if facts.ratio is not None and before.phase is Phase.SETTLING:
            self.story.measured(facts.ratio)
        if before.phase is not track.phase:
            self.story.entered(str(track.phase), track.state.reason)
        if transition.action in (Action.PREWARM, Action.INSTALL):
            self._memory.begin_compiling()
        if transition.action is Action.CAPTURE:
            self.flip.begin_capture()
        elif transition.action is Action.PREWARM:
            self.flip.begin_prewarm(trainer_facts.device_type(self._trainer.lightning_module))
        elif transition.action is Action.INSTALL:
            self.flip.install()
        elif transition.action is Action.TAKE_OUT:
            self._take_out(track)

    def _take_out(self, track: Track) -> None:
        self.watch.cool_down(track)
        if not self.watch.tracks.anyone_uses_compiled_code():
            self.flip.take_out()

    @property
    def ever_flipped(self) -> bool:
        """Whether anything was ever put in place."""
        return self.watch.tracks.flipped() > 0

    @property
    def main_track(self) -> Track | None:
        """The signature that a receipt is about."""
        return self.watch.tracks.main()

    @property
    def main_state(self) -> State:
        """Where that signature stands."""
        track = self.main_track
        return track.state if track is not None else State()
