"""What step is this: signatures, their tracks, and the one step whose operations are recorded."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.islands import fp8_state
from lightning_hotcompile.plan.prior import OpStatistics
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.run.stages import begins_pass
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.inductor.compilers import saved_draws
from lightning_hotcompile.tracks import Track, TrackBook
from lightning_hotcompile.watch.canonical import OpGraph
from lightning_hotcompile.watch.detector import StepDetector
from lightning_hotcompile.watch.family import Families, differ_in_sizes_only, is_family
from lightning_hotcompile.watch.opgraph import OpRecorder
from lightning_hotcompile.watch.signature import SignatureReader, StepSignature
from lightning_hotcompile.watch.step_record import StepRecord

_RECORDED_STEP = 8
"""Its operations are timed as well, and the first steps hold much that is done once."""

_LATEST = 256
"""So many of the steps that were looked at tell how often a kind of step comes."""

_FIRST_TYPICAL = 2
"""The first step still builds the optimizer's state."""


class StepWatch:
    """Reads the signature of each step of one stage, and counts until one is hot.

    Args:
        trainer: knows where an epoch begins.
        module: the model.
        config: the callback's options.
        stage: ``train`` or another stage of the Trainer.
        story: told when a signature becomes hot.
        first: where each signature begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        config: HotCompileConfig,
        stage: str,
        story: Story,
        first: State | None = None,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._stage = stage
        self._story = story
        self._reader = SignatureReader(module, str(trainer.precision), Families.for_setting(config.dynamic))
        self._detector = StepDetector(threshold=config.threshold)
        self._unit: dict[int, Track] = {}
        self.unit_number = 0
        """Of the optimizer step whose micro-steps run now."""

        self.recorder: OpRecorder | None = None
        """Of the operations of the running step, if it is one to record."""

        self._last: Track | None = None
        self._latest: deque[Track] = deque(maxlen=_LATEST)
        self.tracks = TrackBook(first=first)
        self.op_graph: OpGraph | None = None
        self.op_statistics: OpStatistics | None = None
        self._automatic = module.automatic_optimization
        self.differentiates_twice = False
        self._recorded_step = recorded_step(config.threshold)
        self._recorded: StepSignature | None = None

    def track_of(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Track:
        """The track of this step."""
        stage = f"{self._stage} {dataloader_idx}" if dataloader_idx else self._stage
        if begins_pass(self._trainer, self._stage, batch_idx):
            self._reader.refresh()
        signature = self._reader.read(batch, stage=stage, fp8=fp8_state())
        last = self._last
        if last is None or last.signature != signature:
            self._last = last = self.tracks.of(signature)
        self._latest.append(last)
        return last

    def record_of(self, track: Track, lane: Lane, wanted: Lane) -> StepRecord:
        """What is known before a step that goes one way, perhaps not the one that was wanted."""
        record = StepRecord(
            phase=track.state.phase.value,
            compiled=lane is not Lane.EAGER,
            unit=self.unit_number,
            pairs=track.interleaved,
        )
        if record.pairs is not None:
            # it may compile, and is looked at for NaN; or it has to be eager
            record.disturbed = lane is Lane.COMPILE or lane is not wanted
            record.without = track.without
        return record

    def share_of(self, track: Track) -> float:
        """Part of the steps that is of this kind, by the latest ones since there was one of it.

        What came before says nothing about what comes: shapes may change in the course of a training.
        """
        are = [each is track for each in self._latest]
        since = are[are.index(True) :] if True in are else [True]
        met, steps = sum(since) - 1, len(since) - 1  # after the first one
        return met / steps if met else 1 / (steps + 1)

    def hot_one(self, now: Track) -> Track | None:
        """The kind of step that is hot: the one that runs now, else the one that came most often of late."""
        if now.hot or self._config.threshold == 0:
            return now
        hot = [each for each in self._latest if each.hot]
        met = Counter(map(id, hot))
        return max(hot, key=lambda track: met[id(track)], default=None)

    def has_gone(self, track: Track) -> bool:
        """Whether it is long since a step was of this kind."""
        return len(self._latest) == _LATEST and not any(each is track for each in self._latest)

    def count(self, track: Track, record: StepRecord, *, at_rest: bool = False) -> None:
        """One step of this signature has ended; at the end of a unit it may have become hot.

        Args:
            track: of the signature.
            record: of the step.
            at_rest: whether this signature need not be counted, where the unit is a step of its own.
        """
        if not (at_rest and record.ends_unit and not self._unit):
            self._unit[id(track)] = track
            self._detector.begin_step(track.signature)
            if self._detector.end_step(boundary=record.ends_unit):
                self._found_hot(track)
            elif record.ends_unit:
                self._take_up_again()
        if record.ends_unit:
            for seen in self._unit.values():
                seen.unit = self._detector.last_unit
                if seen is not track:  # which knows of it
                    seen.end_unit()
            self._unit.clear()
            self.unit_number += 1

    def _found_hot(self, last: Track) -> None:
        for seen in self._unit.values():
            seen.hot = True
        unit = self._detector.last_unit
        family = self._reader.families.text(last.signature.batch)
        self._story.detected(last.signature.digest, self._detector.count(unit), self.op_graph, family)

    def _take_up_again(self) -> None:
        """A track that was forgotten for lack of room begins anew; its unit is known to be hot still."""
        forgotten = [seen for seen in self._unit.values() if not (seen.hot or seen.state.flips)]
        if forgotten and self._detector.is_hot:
            for seen in forgotten:
                seen.hot = True

    def cool_down(self, track: Track) -> None:
        """What was tried and taken back has to come back more often before it is hot again."""
        track.hot = False
        self._detector.raise_threshold(track.signature if track.unit is None else track.unit)

    def is_one_to_record(self, track: Track, record: StepRecord) -> bool:
        """Whether this is the step whose operations are to be known, should anything be compiled."""
        if self.op_graph is not None or record.compiled or record.pairs is not None or track.is_hopeless:
            return False
        if self.tracks.first.phase is not Phase.OBSERVING:
            return False
        return track.steps + 1 == self._recorded_step

    def begin_recording(self, record: StepRecord) -> None:
        """Record the operations of this step."""
        self._recorded = self._last.signature if self._last is not None else None
        record.disturbed = record.recorded = True
        self.recorder = OpRecorder()
        self.recorder.start()

    def end_recording(self) -> None:
        """Stop recording operations, if this step is recorded; a second call does nothing."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.stop()
            self.op_graph = graph = recorder.graph()
            if graph is not None and self._automatic:  # else the optimizers' steps are among them
                is_typical = self._recorded_step >= _FIRST_TYPICAL
                seconds = recorder.seconds_by_op if is_typical else None
                self.op_statistics = OpStatistics.of(
                    graph.counts,
                    graph.elements_by_op,
                    seconds,
                    recorder.forward_ops,
                    saved_draws(self._config.backend, self._config.random, self._config.options),
                )
            self.differentiates_twice |= recorder.differentiates_twice

    def sizes_in(self, signature: StepSignature) -> frozenset[int] | None:
        """Sizes of dimensions of all tensors of such a step that was recorded, ``None`` if none was.

        A family has them from one of its batches: what else there is varies.
        """
        if self.op_graph is None or (recorded := self._recorded) is None or self._config.dynamic is False:
            return None
        stage, batch, *others = signature
        if is_family(batch) and differ_in_sizes_only(batch, recorded.batch):
            batch = recorded.batch
        return self.op_graph.sizes if recorded == (stage, batch, *others) else None


def recorded_step(threshold: int) -> int:
    """Which step of a signature is recorded: one before anything is compiled, and not the first if possible.

    Args:
        threshold: steps before a signature is hot.
    """
    return min(_RECORDED_STEP, max(1, min(_FIRST_TYPICAL, threshold), threshold - 2))
