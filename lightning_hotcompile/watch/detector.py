"""Says when the same step has come back often enough to be worth compiling."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from lightning_hotcompile.config import whole_number
from lightning_hotcompile.errors import ConfigError, HotCompileError
from lightning_hotcompile.watch.unit import RecordedSignature, UnitSignature, describe, label

TOP = 5

_OFTEN = 2
"""So many runs' worth of units make a signature hot, whatever lies between them."""

_RARE = 8
"""Not if it is less than one in so many units."""


@dataclass(frozen=True, kw_only=True)
class DetectorStats:
    """What a detector has seen."""

    steps_seen: int
    units_seen: int
    """Units that ended: with gradient accumulation fewer than the steps."""
    unique: int
    """Different signatures; one that was forgotten for lack of room and came back counts again."""
    hot: int
    threshold: int
    top: tuple[tuple[str, int], ...]
    """The five most frequent signatures, by digest or ``repr``, each with its number of units."""


@dataclass(kw_only=True)
class _Track:
    """What is known about one signature."""

    threshold: int
    count: int = 0
    run: int = 0
    last_unit: int = -1
    met: int = 0
    since: int = 0
    """Units of it since this one: more of them than in its run, where kinds of steps take turns."""

    hot: bool = False
    raised: bool = False

    def meet(self, unit: int, max_gap: int) -> bool:
        """One more unit of it; returns whether it made it hot."""
        gap = unit - self.last_unit - 1
        if not self.met or gap > _RARE * max(1, self.threshold):
            self.met, self.since = 0, unit
        self.run = self.run + 1 if self.run and gap <= max_gap else 1
        self.met, self.count, self.last_unit = self.met + 1, self.count + 1, unit
        is_often = self.met >= _OFTEN * self.threshold and (self.met - 1) * _RARE >= unit - self.since
        became_hot = not self.hot and (self.run >= self.threshold or is_often)
        self.hot = self.hot or became_hot
        return became_hot


class StepDetector:
    """Counts identical steps, and says when one has become hot. Needs no Lightning.

    A *unit* is what lies between two optimizer steps: one step, or all micro-steps of a cycle of gradient
    accumulation. A signature's run goes on as long as at most ``max_gap`` other units lie between two of
    its occurrences, because the last batch of an epoch is often a short one: with a strict rule
    an epoch shorter than the threshold would never let the usual step become hot. A longer gap means
    that the loop is doing something else, and the run starts again at 1. Where several kinds of steps take
    turns (resolutions, tasks), no run is long: there twice as many units make a signature hot, if at least
    about one unit in eight is of it.

    At most ``max_signatures`` are remembered: the one seen longest ago goes first, those that are hot or had
    their threshold raised only when there is no other.

    Args:
        threshold: units in a run that make a signature hot; with 0 everything is hot from the start.
        max_signatures: how many signatures are remembered.
        max_gap: other units that may lie inside a run.

    Raises:
        ConfigError: a value is not a whole number, or too small.

    Example:
        >>> import torch
        >>> detector = StepDetector(threshold=2)
        >>> for batch in (torch.ones(4, 8), torch.zeros(4, 8)):
        ...     detector.begin_step()
        ...     detector.record("linear", batch)
        ...     print(detector.end_step())
        False
        True
    """

    def __init__(self, threshold: int = 10, max_signatures: int = 64, max_gap: int = 1) -> None:
        self.threshold = whole_number("threshold", threshold, least=0)
        self.max_signatures = whole_number("max_signatures", max_signatures, least=1)
        self.max_gap = whole_number("max_gap", max_gap, least=0)
        self.reset()

    def reset(self) -> None:
        """Forget everything, raised thresholds too: for another stage, optimizer or dataloader."""
        self._tracks: OrderedDict[Hashable, _Track] = OrderedDict()
        self._unit: list[tuple[Hashable, int]] = []
        self.last_unit: Hashable = None
        """Signature of the unit that ended last; ``None`` before the first."""

        self._latest: tuple[Hashable, _Track] | None = None
        """The signature that was asked for last, and its track."""

        self._begun = False
        self._given: Hashable = None
        self._recorded = hashlib.sha256()
        self._n_recorded = 0
        self._steps_seen = self._units_seen = self._unique = 0

    def begin_step(self, signature: Hashable = None) -> None:
        """Begin a step; one that was begun and not ended is forgotten (an exception in it, say).

        Args:
            signature: anything hashable that says what the step is; ``None``: ``record`` will tell.
        """
        self._begun, self._given = True, signature
        if signature is None:
            self._recorded, self._n_recorded = hashlib.sha256(), 0

    def record(self, op: str, *tensors_or_meta: object) -> None:
        """Tell one operation of the step that was begun: its name, and the shape and dtype of each tensor.

        Nothing is kept but a digest. Plain values count by value, other objects by their type.

        Raises:
            HotCompileError: no step was begun, or it was begun with a signature of its own.
        """
        if not self._begun:
            raise HotCompileError(f"record({op!r}) outside a step: call begin_step() first.")
        if self._given is not None:
            raise HotCompileError(
                f"record({op!r}) in a step that was begun with the signature {label(self._given)}: "
                "call begin_step() without one, or leave record() away."
            )
        self._recorded.update(f"{op}({';'.join(map(describe, tensors_or_meta))})\n".encode())
        self._n_recorded += 1

    def end_step(self, boundary: bool = True) -> bool:
        """End the step that was begun.

        Args:
            boundary: whether an optimizer step ended with it. ``False``: the unit goes on with the next step.

        Returns:
            ``True`` only when the unit that ended made its signature hot.

        Raises:
            HotCompileError: no step was begun, or nothing says what the step was.
        """
        signature = self._given if self._given is not None else self._recorded_signature()
        self._begun, self._given = False, None
        self._steps_seen += 1
        if self._unit and self._unit[-1][0] == signature:
            self._unit[-1] = (signature, self._unit[-1][1] + 1)
        else:
            self._unit.append((signature, 1))
        return self._end_unit() if boundary else False

    def _recorded_signature(self) -> RecordedSignature:
        if not self._begun:
            raise HotCompileError("end_step() without a step: call begin_step() first.")
        if self._n_recorded == 0:
            raise HotCompileError(
                "nothing says what this step was: call begin_step(signature), or record() for its operations."
            )
        return RecordedSignature(digest=self._recorded.hexdigest(), n_ops=self._n_recorded)

    def _end_unit(self) -> bool:
        steps, self._unit = tuple(self._unit), []
        # A unit of one step is named by that step itself, so that count(signature) is what one expects.
        signature = steps[0][0] if len(steps) == 1 and steps[0][1] == 1 else UnitSignature(steps=steps)
        track = self._track(signature)
        became_hot = track.meet(self._units_seen, self.max_gap)
        self._units_seen += 1
        self.last_unit = signature
        return became_hot

    def _track(self, signature: Hashable) -> _Track:
        if self._latest is not None and self._latest[0] is signature:
            return self._latest[1]
        track = self._tracks.get(signature)
        if track is None:
            self._make_room()
            track = self._tracks[signature] = _Track(threshold=self.threshold)
            self._unique += 1
        self._tracks.move_to_end(signature)
        self._latest = signature, track
        return track

    def _make_room(self) -> None:
        if len(self._tracks) < self.max_signatures:
            return
        oldest_first = iter(self._tracks.items())
        plain = (signature for signature, track in oldest_first if not (track.hot or track.raised))
        del self._tracks[next(plain, next(iter(self._tracks)))]

    @property
    def is_hot(self) -> bool:
        """Whether the last unit's signature is hot; with threshold 0 also before the first unit."""
        track = self._tracks.get(self.last_unit)
        return self.threshold == 0 if track is None else track.hot

    @property
    def hot_signatures(self) -> tuple[Hashable, ...]:
        """The hot signatures, the one seen longest ago first."""
        return tuple(signature for signature, track in self._tracks.items() if track.hot)

    def count(self, signature: Hashable) -> int:
        """Units seen with this signature; 0 if it is not remembered."""
        track = self._tracks.get(signature)
        return 0 if track is None else track.count

    def threshold_of(self, signature: Hashable) -> int:
        """Units in a run that make this signature hot, raises included."""
        track = self._tracks.get(signature)
        return self.threshold if track is None else track.threshold

    def raise_threshold(self, signature: Hashable, factor: float = 2.0) -> None:
        """Make a signature cold, and its next run longer by ``factor``: it was tried and taken back.

        Raises:
            ConfigError: the factor is not above 1.
        """
        if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 1):
            raise ConfigError(f"factor={factor!r} is not allowed: give a number above 1, for example 2.")
        track = self._track(signature)
        track.threshold = math.ceil(max(1, track.threshold) * factor)
        track.run, track.met, track.hot, track.raised = 0, 0, False, True

    def stats(self) -> DetectorStats:
        """What was seen so far, with the most frequent signatures."""
        ranked = sorted(self._tracks.items(), key=lambda item: -item[1].count)[:TOP]
        return DetectorStats(
            steps_seen=self._steps_seen,
            units_seen=self._units_seen,
            unique=self._unique,
            hot=sum(track.hot for track in self._tracks.values()),
            threshold=self.threshold,
            top=tuple((label(signature), track.count) for signature, track in ranked),
        )
