"""One stage under the callback: feeds the machine with facts and does what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.run import trainer_facts
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.memory import Memory
from lightning_hotcompile.run.nap import Calm, Nap
from lightning_hotcompile.run.rounds import Rounds
from lightning_hotcompile.run.side_gains import SideGains
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.run.stages import TRAIN, ends_unit
from lightning_hotcompile.run.step_watch import StepWatch
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.ranks import Ranks
from lightning_hotcompile.swap.shared import Shared
from lightning_hotcompile.together import Together
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.clock import DRAINED_TOGETHER, StepClock
from lightning_hotcompile.watch.step_record import StepRecord


class Session:
    """Watches the steps of one stage and swaps the model when the machine says so.

    Args:
        trainer: whose stage it is.
        module: the LightningModule that is trained.
        config: the callback's options.
        plan: what is compiled once a step is hot.
        emit: receives each event.
        memory: what earlier runs have learned.
        stage: ``train``, ``validate``, ``test`` or ``predict``.
        first: where each signature begins; it is declined there if nothing is to be compiled.
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
        first: State | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        ranks = Ranks(config.threshold, alone=stage != TRAIN or trainer.world_size == 1)
        child_limit_s = config.compile_timeout
        config = replace(config, compile_timeout=ranks.within_timeout(child_limit_s))
        self._trainer, self._stage, self._now = trainer, stage, now
        self.ledger = Ledger(now)
        self.story = Story(emit, lambda: self.steps)
        self.watch = StepWatch(trainer, module, config, stage, self.story, first)
        self._booked = 0
        self._together = Together(ranks, plan.digest)
        self.side = SideGains(trainer, module, config, stage, self.story, memory.of_optimizers)
        self.ledger.saved_besides_s = lambda: self.side.saved_s(self.rounds.compiled_runs)
        context = StageContext(
            trainer=trainer,
            module=module,
            config=config,
            stage=stage,
            watch=self.watch,
            ledger=self.ledger,
            story=self.story,
            memory=memory,
            side=self.side,
            together=self._together,
            shared=Shared(trainer.optimizers),
            child_limit_s=child_limit_s,
            now=now,
        )
        self.rounds = Rounds(context, plan)
        self._clock = StepClock(device_type=trainer_facts.device_type(module), now=now)
        self._current: tuple[Track, StepRecord, Lane] | None = None
        self._gave_up: str | None = None
        self.nap: Nap | None = None
        self._calm = Calm()

    def consider_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Ask everything anew: decide how the step that is about to run goes."""
        with self.ledger.own_time:
            self.abandon_step()
            if self._gave_up is None:
                self._decide_on(batch, batch_idx, dataloader_idx)
            else:
                self._together.answer_for(self._gave_up, self.steps)

    def _decide_on(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        track, steps = self.watch.track_of(batch, batch_idx, dataloader_idx), self.steps
        waits = track.is_waiting and not self._together.several
        if not waits or steps % DRAINED_TOGETHER == 0:
            self.book_finished_steps()
        self.flip.batch.begin(batch, track.signature.batch, partial(self.watch.sizes_in, track.signature))
        self.side.consider_step(steps, self.watch.tracks)
        at_rest = not waits and self._move(track, steps, batch)
        wanted, flip = track.lane(), self.flip
        lane = flip.lane(wanted)
        self._calm.look(lane, at_rest=at_rest)
        record = self.watch.record_of(track, lane, wanted)
        flip.ahead.mark(record)
        self._current = (track, record, lane)

    def _move(self, track: Track, steps: int, batch: Any) -> bool:
        """Whether nothing can change any longer, after at most one transition if something could."""
        if self._is_at_rest(track):
            return True
        flip = self.flip
        self.rounds.move(track, steps)
        if self.flip is not flip:  # another plan is tried
            flip.batch.end()
            flip = self.flip
            flip.batch.begin(batch, track.signature.batch, partial(self.watch.sizes_in, track.signature))
        return self._is_at_rest(track)

    def begin_step(self) -> None:
        """The step that was considered begins: what is done from now on counts as its own."""
        if self._current is None:
            return
        track, record, lane = self._current
        with self.ledger.own_time:
            self.flip.open(lane, armed=record.pairs is None or lane is Lane.COMPILE, without=record.without)
            if self.watch.is_one_to_record(track, record):
                self.book_finished_steps()
                if self.rounds.now.weighing.may_pay():
                    self.watch.begin_recording(record)
                    self._calm.begin_anew()
            self.side.begin_step()
        self._clock.start(record)

    def after_step(self) -> None:
        """End the step: stop the clock, book what ran."""
        if self._current is None:
            self._booked += self._gave_up is not None
            return
        self._clock.stop()
        (track, record, lane), self._current = self._current, None
        self._booked += 1
        with self.ledger.own_time:
            record.ends_unit = ends_unit(self._trainer, self._stage)
            self._look_back(track, record, lane)
            if self.side.end_step(record):
                self.book_finished_steps()
                self.ledger.forget_eager_steps()
            is_calm = self._calm.is_enough(nothing_pays=self.watch.tracks.all_are_hopeless)
            if is_calm and not self.side.is_busy:
                self.nap = Nap(track, lane, self.flip, self._now)

    def _look_back(self, track: Track, record: StepRecord, lane: Lane) -> None:
        """Find out what happened in the step."""
        if self.watch.recorder is not None:
            self.watch.end_recording()
        ran, new = self.flip.close()
        missed = lane is not Lane.EAGER and not ran
        record.stalled |= new
        record.compiled = lane is not Lane.EAGER and ran
        record.disturbed |= new or missed
        if record.without is not None:
            lane = Lane.EAGER  # a miss here says nothing about the plan as a whole
        pays = partial(self.rounds.now.weighing.recompile_pays, track)
        track.ran(lane=lane, compiled=ran, ends_unit=record.ends_unit, recompile_pays=pays)
        at_rest = self._is_at_rest(track)
        if record.disturbed or not at_rest:
            self._calm.stay_awake()
        self.watch.count(track, record, at_rest=at_rest)

    def _is_at_rest(self, track: Track) -> bool:
        """Whether nothing can change for this signature, so that its step need not be looked at."""
        phase = track.state.phase
        at_rest = (phase is Phase.STEADY and not self.flip.is_lost) or phase is Phase.DECLINED
        at_rest |= phase is Phase.REVERTED and not track.state.may_retry
        at_rest |= self._together.has_settled and not phase.uses_compiled_code
        return at_rest and track.failure is None and not self.flip.has_news

    @property
    def steps(self) -> int:
        """That have ended, those of a nap too."""
        return self._booked + (self.nap.steps if self.nap is not None else 0)

    def abandon_step(self) -> None:
        """Leave a step that did not end (an exception, or an epoch that was cut short)."""
        if self.watch.recorder is not None:
            self.watch.end_recording()
        if self._current is not None:
            self._current = None
            self._clock.abandon()
            self.flip.abandon_step()
        if self.nap is not None:
            self._end_nap(self.nap)

    def leave(self) -> None:
        """Another stage comes in between: until the next step no time is this one's."""
        self.abandon_step()
        self._clock.leave()

    def pause(self) -> None:
        """Out of the model until :meth:`go_on`, while another stage comes in between."""
        self.leave()
        self.book_finished_steps()
        self.flip.pause()

    def look_aside(self) -> None:
        """A step of another stage is about to run."""
        self.flip.ahead.look()

    def go_on(self) -> None:
        """Back into the model, if it was in when paused."""
        self.flip.go_on()

    def finish(self) -> None:
        """Change everything back and close the books; an error of one thing keeps no other from it."""
        with ExitStack() as last_one_first:
            last_one_first.callback(self.side.finish)
            last_one_first.callback(self.rounds.close)
            last_one_first.callback(self.book_finished_steps, wait=True)
            last_one_first.callback(self.abandon_step)

    def give_up(self, reason: str) -> None:
        """Stay eager from now on, but go on answering the other ranks: they would wait for ever."""
        try:
            self.finish()
        finally:
            self._gave_up = reason
            for track in self.watch.tracks:
                if track.phase.uses_compiled_code or track.phase.is_at_work:
                    track.state = replace(track.state, phase=Phase.REVERTED, reason=reason)
                    self.story.entered(str(track.phase), reason)
            self._together.answer_for(reason, self.steps)

    def book_finished_steps(self, *, wait: bool = False) -> None:
        """Bring the ledger up to date, at rest once for many steps; ``wait``: for the accelerator too."""
        try:
            for finished in self._clock.drain(wait=wait):
                assert isinstance(finished.tag, StepRecord)
                self.ledger.add(finished, finished.tag)
        finally:
            if self.nap is not None:
                self._booked += self.nap.book(self.ledger)

    def _end_nap(self, nap: Nap) -> None:
        nap.end()
        try:
            self.book_finished_steps()
        finally:
            self.nap = None
        self._clock.abandon()  # what went by since the last step that was timed is no waiting
        if nap.missed:
            self._calm.stay_awake()

    @property
    def plan(self) -> CompilePlan:
        """The plan in use."""
        return self.rounds.now.plan

    @property
    def flip(self) -> Flip:
        """What changes the model by that plan."""
        return self.rounds.now.flip
