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
from lightning_hotcompile.plan.islands import fp8_state
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.ledger import Ledger, StepRecord, leave_out_mixed_unit
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.ranks import Ranks
from lightning_hotcompile.together import Together
from lightning_hotcompile.tracks import Track, TrackBook
from lightning_hotcompile.watch.clock import StepClock
from lightning_hotcompile.watch.detector import StepDetector
from lightning_hotcompile.watch.opgraph import OpGraph, OpRecorder
from lightning_hotcompile.watch.signature import SignatureReader

_FULL_READ_EVERY = 8
_RECORDED_STEP = 2  # the first step still builds the optimizer's state


class Session:
    """Watches the steps of one fit and swaps the model when the machine says so.

    Args:
        trainer: of this fit.
        module: the LightningModule that is trained.
        config: the callback's options.
        plan: what is compiled once a step is hot.
        emit: receives each event.
        now: a clock in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        config: HotCompileConfig,
        plan: CompilePlan,
        emit: Callable[[Event], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._now = now
        self.plan = plan
        self.ledger = Ledger()
        self.story = Story(emit, lambda: self.steps)
        self.tracks = TrackBook()
        self.detector = StepDetector(threshold=config.threshold)
        self.flip = Flip(trainer, module, config, plan, self.ledger, self.story, now)
        self.judge = Judge(trainer, config, self.flip, self.tracks, self.ledger)
        self.op_graph: OpGraph | None = None
        self.steps = 0
        self._together = Together(Ranks(interval=config.threshold), plan.digest)
        self._leader: Track | None = None
        self._clock = StepClock(device_type=trainer_facts.device_type(module), now=now)
        self._reader = SignatureReader(module, precision=str(trainer.precision))
        self._unit: list[tuple[Track, StepRecord]] = []
        self._recorder: OpRecorder | None = None
        self._current: tuple[Track, StepRecord, Lane] | None = None
        self._last_track: Track | None = None
        self._gave_up: str | None = None

    def before_step(self, batch: Any) -> None:
        """Decide how the step that is about to run goes, and begin to time it."""
        start, installed_s = self._now(), self.ledger.install_s
        if self._current is not None:
            self.abandon_step()
        if self._gave_up is not None:
            self._together.answer_for(self._gave_up, self.steps)
            return
        self._book_finished_steps()
        track = self._track_of(batch)
        if not self._is_at_rest(track):
            self.flip.end_capture()
            if self._together.several:
                self._move_together()
            else:
                self._move(track)
        lane = track.lane() if self.flip.in_place else Lane.EAGER
        record = StepRecord(phase=track.phase.value, compiled=lane is not Lane.EAGER)
        if track.phase is Phase.SETTLING:
            record.pairs = track.pairs
        self._current = (track, record, lane)
        self.flip.open(lane)
        self._begin_recording(track, record)
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
        if self._recorder is not None:
            self.end_recording()
        self.steps += 1
        record.ends_unit = trainer_facts.ends_unit(self._trainer)
        ran, new_graphs = self.flip.close()
        record.stalled = new_graphs
        record.compiled = lane is not Lane.EAGER and ran
        record.disturbed |= new_graphs or (lane is not Lane.EAGER and not ran)
        track.ran(lane=lane, compiled=ran, ends_unit=record.ends_unit)
        if not self._is_at_rest(track):
            self._count(track, record)
        self.ledger.own_s += self._now() - start

    def _track_of(self, batch: Any) -> Track:
        """The track of this step. Most steps are like the one before: comparing is cheaper than hashing.

        At rest the model's flags are read now and then only: compiled code has guards on them.
        """
        last = self._last_track
        new_epoch = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready <= 1
        if new_epoch:
            self._reader.refresh()
        may_reuse = last is not None and self.steps % _FULL_READ_EVERY and self._is_at_rest(last)
        if last is not None and may_reuse and not new_epoch and self._reader.is_like(last.signature, batch):
            return last
        signature = self._reader.read(batch, fp8=fp8_state())
        if last is None or last.signature != signature:
            self._last_track = last = self.tracks.of(signature)
        return last

    def _is_at_rest(self, track: Track) -> bool:
        """Whether nothing can change for this signature, so that its step need not be looked at."""
        at_rest = track.phase is Phase.STEADY or track.phase is Phase.DECLINED
        return at_rest and track.failure is None and not self.flip.has_news

    def abandon_step(self) -> None:
        """Leave a step that did not end (an exception, or an epoch that was cut short)."""
        self.end_recording()
        if self._current is not None:
            self._current = None
            self._clock.abandon()
            self.flip.abandon_step()

    def finish(self) -> None:
        """Change everything back and close the books."""
        self.abandon_step()
        self._book_finished_steps()
        self.flip.take_out()

    def give_up(self, reason: str) -> None:
        """Stay eager from now on, but go on answering the other ranks: they would wait for ever."""
        self.finish()
        self._gave_up = reason
        for track in self.tracks:
            if track.phase.uses_compiled_code:
                track.state = replace(track.state, phase=Phase.REVERTED, reason=reason)
        self._together.answer_for(reason, self.steps)

    def _count(self, track: Track, record: StepRecord) -> None:
        self._unit.append((track, record))
        self.detector.begin_step(track.signature)
        if self.detector.end_step(boundary=record.ends_unit):
            for seen, _ in self._unit:
                seen.hot = True
            unit = self.detector.last_unit
            self.story.detected(track.signature.digest, self.detector.count(unit), self.op_graph)
        if record.ends_unit:
            leave_out_mixed_unit(self._unit)
            self._unit.clear()

    def _book_finished_steps(self) -> None:
        for finished in self._clock.drain():
            assert isinstance(finished.tag, StepRecord)
            self.ledger.add(finished, finished.tag)

    def _begin_recording(self, track: Track, record: StepRecord) -> None:
        if self.op_graph is not None or record.compiled or track.steps + 1 != _RECORDED_STEP:
            return
        record.disturbed = record.recorded = True
        self._recorder = OpRecorder()
        self._recorder.start()

    def end_recording(self) -> None:
        """Stop recording operations, if this step is recorded; a second call does nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            self.op_graph = recorder.graph()

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
            self._move(self._leader)
            return
        if not together.is_due(self.steps):
            return
        leader = self._leader or next((t for t in self.tracks if t.hot), None)
        facts = self.judge.facts(leader) if leader is not None else Facts()
        transition = advance(leader.state, facts) if leader is not None else Transition(together.state)
        agreed = together.exchange(transition.state, self.steps)
        leader = leader or (self.tracks.main() if agreed is not None else None)
        if leader is None:
            return
        if facts.ratio is not None and transition.state == leader.state:
            leader.looks += 1  # looked at and not decided; a decision waits for the others
        if agreed is None:
            # Within the flip an action need not change the phase: all ranks install at this batch.
            if together.state.phase is Phase.FLIPPING and transition.state.phase is Phase.FLIPPING:
                self._perform(leader, transition, facts)
            return
        self._leader = leader
        if agreed.phase != str(transition.state.phase):
            ended = replace(leader.state, phase=Phase(agreed.phase), reason=agreed.reason)
            transition = Transition(ended, Action.TAKE_OUT)
        self._perform(leader, transition, facts)
        together.state = leader.state

    def _perform(self, track: Track, transition: Transition, facts: Facts) -> None:
        if transition.state == track.state and transition.action is Action.NONE:
            return
        before, track.state = track.state, transition.state
        if transition.action in (Action.CAPTURE, Action.INSTALL) and before.phase is not Phase.FLIPPING:
            track.began_flip()
            self.ledger.pairs = track.pairs
            self.story.planned(self.plan.scope, self.plan.reason, len(self.plan.regions), str(self.plan))
        if facts.ratio is not None and before.phase is Phase.SETTLING:
            self.story.measured(facts.ratio)
        if before.phase is not track.phase:
            self.story.entered(str(track.phase), track.state.reason)
        if transition.action is Action.CAPTURE:
            self.flip.begin_capture()
        elif transition.action is Action.INSTALL:
            self.flip.install()
        elif transition.action is Action.TAKE_OUT:
            self._take_out(track)

    def _take_out(self, track: Track) -> None:
        track.hot = False
        self.detector.raise_threshold(self.detector.last_unit or track.signature)
        if not self.tracks.anyone_uses_compiled_code():
            self.flip.take_out()

    @property
    def ever_flipped(self) -> bool:
        """Whether anything was ever put in place."""
        return self.tracks.flipped() > 0

    @property
    def main_state(self) -> State:
        """Where the signature stands that a receipt is about."""
        track = self.tracks.main()
        return track.state if track is not None else State()
