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
from lightning_hotcompile.machine import Action, Facts, Phase, State, Transition, advance
from lightning_hotcompile.plan.forecast import Decision, expected_compile_s, forecast
from lightning_hotcompile.plan.islands import fp8_state
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.ledger import Ledger, StepRecord
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.ranks import Proposal, Ranks, agree
from lightning_hotcompile.tracks import Track, TrackBook
from lightning_hotcompile.watch.clock import StepClock
from lightning_hotcompile.watch.detector import StepDetector
from lightning_hotcompile.watch.opgraph import OpGraph, OpRecorder
from lightning_hotcompile.watch.signature import SignatureReader

SETTLING_LOOKS = (10, 20, 40)
"""After so many pairs of eager and compiled units the ratio is looked at."""

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
        self.decision: Decision | None = None
        self.op_graph: OpGraph | None = None
        self.steps = 0
        self._ranks = Ranks(interval=config.threshold)
        self._clock = StepClock(device_type=trainer_facts.device_type(module), now=now)
        self._reader = SignatureReader(module, precision=str(trainer.precision))
        self._unit: list[Track] = []
        self._recorder: OpRecorder | None = None
        self._current: tuple[Track, StepRecord, Lane] | None = None

    def before_step(self, batch: Any) -> None:
        """Decide how the step that is about to run goes, and begin to time it."""
        start, installed_s = self._now(), self.ledger.install_s
        self.abandon_step()
        self._book_finished_steps()
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready <= 1:
            self._reader.refresh()
        signature = self._reader.read(batch, fp8=fp8_state())
        track = self.tracks.of(signature)
        self.detector.begin_step(signature)
        self.flip.end_capture()
        self._move(track)
        lane = track.lane() if self.flip.in_place else Lane.EAGER
        record = StepRecord(phase=str(track.phase), compiled=lane is not Lane.EAGER)
        self._current = (track, record, lane)
        self.flip.open(lane)
        self._begin_recording(track, record)
        self.ledger.own_s += self._now() - start - (self.ledger.install_s - installed_s)
        self._clock.start(record)

    def after_step(self) -> None:
        """End the step: stop the clock, book what ran."""
        if self._current is None:
            return
        self._clock.stop()
        start = self._now()
        (track, record, lane), self._current = self._current, None
        self._end_recording()
        self.steps += 1
        record.ends_unit = trainer_facts.ends_unit(self._trainer)
        ran, new_graphs = self.flip.close()
        record.stalled = new_graphs
        record.compiled = lane is not Lane.EAGER and ran
        record.disturbed |= new_graphs or (lane is not Lane.EAGER and not ran)
        track.ran(lane=lane, compiled=ran, ends_unit=record.ends_unit)
        self._count(track, record.ends_unit)
        self.ledger.own_s += self._now() - start

    def abandon_step(self) -> None:
        """Leave a step that did not end (an exception, or an epoch that was cut short)."""
        self._end_recording()
        if self._current is not None:
            self._current = None
            self._clock.abandon()
            self.flip.abandon_step()

    def finish(self) -> None:
        """Change everything back and close the books."""
        self.abandon_step()
        self._book_finished_steps()
        self.flip.take_out()

    def _count(self, track: Track, ends_unit: bool) -> None:
        self._unit.append(track)
        if self.detector.end_step(boundary=ends_unit):
            for seen in self._unit:
                seen.hot = True
            unit = self.detector.last_unit
            self.story.detected(track.signature.digest, self.detector.count(unit), self.op_graph)
        if ends_unit:
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

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            self.op_graph = recorder.graph()

    def _move(self, track: Track) -> None:
        """At most one transition of this signature; with several ranks only all together."""
        facts = self._facts(track)
        transition = advance(track.state, facts)
        if self._ranks.world_size > 1:
            transition = self._agreed(track, transition)
        if facts.ratio is not None:
            track.looks += 1
        if transition.state != track.state or transition.action is not Action.NONE:
            self._perform(track, transition, facts)

    def _agreed(self, track: Track, transition: Transition) -> Transition:
        main = self.tracks.main() or track
        if not self._ranks.is_due(str(main.phase), self.steps):
            return Transition(track.state)
        wanted = transition.state if track is main else main.state
        proposal = Proposal(
            rank=self._ranks.rank, phase=str(wanted.phase), reason=wanted.reason, plan_digest=self.plan.digest
        )
        agreed = agree(self._ranks.exchange(proposal), str(main.phase))
        if agreed is None:
            # Inside the flip an action (install) does not change the phase: all do it together.
            same = transition.state.phase is track.phase is Phase.FLIPPING and track is main
            return transition if same else Transition(track.state)
        if track is main and agreed.phase == str(transition.state.phase):
            return transition
        ended = replace(main.state, phase=Phase(agreed.phase), reason=agreed.reason)
        action = Action.TAKE_OUT if main.phase.uses_compiled_code else Action.NONE
        if track is not main:
            self._perform(main, Transition(ended, action), Facts())
            return Transition(track.state)
        return Transition(ended, action)

    def _facts(self, track: Track) -> Facts:
        hot = track.hot or self._config.threshold == 0
        undecided = track.phase in (Phase.OBSERVING, Phase.REVERTED)
        pairs = self.ledger.pairs
        settling = track.phase is Phase.SETTLING
        look = settling and track.looks < len(SETTLING_LOOKS) and pairs.n >= SETTLING_LOOKS[track.looks]
        return Facts(
            hot=hot,
            decision=self._decide(track) if hot and undecided else None,
            needs_capture=self._config.threshold > 0 and not self.flip.in_place and self.flip.needs_capture,
            installed=self.flip.in_place,
            compiled_steps=track.compiled_steps,
            failure=self._failure(track) if track.phase.uses_compiled_code else None,
            retry=track.failure is not None,
            ratio=pairs.ratio() if look else None,
            settling_is_over=track.looks + 1 >= len(SETTLING_LOOKS) if look else track.settling_is_over,
            min_speedup=self._config.min_speedup,
            max_flips=self._config.max_flips,
        )

    def _failure(self, track: Track) -> str | None:
        failure = self.flip.failure()
        if failure is None and track.compiled_steps:
            failure = self.flip.why_nothing_ran()
        return failure or track.failure

    def _decide(self, track: Track) -> Decision:
        flipped, limit = self.tracks.flipped(), self._config.max_signatures
        if flipped >= limit and not track.state.flips:
            return Decision(go=False, reason=f"max_signatures={limit} is reached")
        if flipped and self._ranks.world_size > 1 and not track.state.flips:
            return Decision(go=False, reason="with several ranks only one signature is compiled")
        if not self._config.cost_gate:
            decision = Decision(go=True, reason="cost_gate=False: compiled without a forecast")
        else:
            step_s = self.ledger.eager_step_s
            kinds = tuple(r.kind for r in self.plan.regions)
            decision = forecast(
                remaining_steps=trainer_facts.remaining_batches(self._trainer, step_s),
                step_s=step_s,
                compile_s=0.0 if flipped else expected_compile_s(kinds),
            )
        self.decision = self.decision or decision
        return decision

    def _perform(self, track: Track, transition: Transition, facts: Facts) -> None:
        before, track.state = track.state, transition.state
        if transition.action in (Action.CAPTURE, Action.INSTALL) and before.phase is not Phase.FLIPPING:
            track.began_flip()
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
