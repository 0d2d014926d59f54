"""The kinds of events, one frozen record each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from time import time as unix_time

from lightning_hotcompile.receipt.wording import count, number


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; only its subclasses are emitted. ``str(event)`` says what happened in words."""

    step: int
    """Batches that the callback had seen when it happened."""

    time: float = field(default_factory=unix_time)
    """Seconds since 1970."""

    stage: str = "train"
    """Stage of the Trainer that it belongs to."""

    @property
    def kind(self) -> str:
        """The class name in snake case, as it stands in the log: ``PhaseChanged`` is ``phase_changed``."""
        return self.kind_name()

    @classmethod
    def kind_name(cls) -> str:
        """The kind of this class, without an instance."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Event):
    """The state machine went into another phase."""

    phase: str
    reason: str

    def __str__(self) -> str:
        return f"now {self.phase}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Detected(Event):
    """A step signature became hot."""

    signature: str
    count: int
    """Identical optimizer steps seen until now."""

    op_sequence: str
    """The step's ops in short, ``linear -> relu -> sum``; empty if no step was recorded."""

    n_ops: int | None
    """Ops of the recorded step, forward and backward; None if no step was recorded."""

    family: str = ""
    """Which dimensions of the batch vary, with the sizes seen; empty if none does."""

    def __str__(self) -> str:
        size = "" if self.n_ops is None else f", {self.n_ops} ops"
        ops = f": {self.op_sequence}" if self.op_sequence else ""
        family = f"; {self.family}" if self.family else ""
        return f"step {self.signature} is hot after {self.count} times{size}{ops}{family}"


@dataclass(frozen=True, kw_only=True)
class FreedMemoryKept(Event):
    """glibc was told to keep what is freed: steps had given it back to the system and taken it again."""

    faults: int
    """Page faults of a step until then."""

    def __str__(self) -> str:
        return f"steps had {self.faults:,} page faults each; what is freed stays with the process now"


@dataclass(frozen=True, kw_only=True)
class Planned(Event):
    """It was decided what to compile."""

    scope: str
    reason: str
    regions: int
    tree: str
    """The plan as printed, with line breaks."""

    def __str__(self) -> str:
        return f"scope {self.scope}, {count(self.regions, 'region')}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Declined(Event):
    """It was decided not to compile."""

    reason: str

    def __str__(self) -> str:
        return f"stays eager: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Compiling(Event):
    """Compiled callables were put in place; the compiler starts."""

    regions: int

    def __str__(self) -> str:
        return count(self.regions, "region")


@dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """A region was compiled, its backward included."""

    region: str
    seconds: float
    n_ops: int | None
    cache_hit: bool | None
    """Whether the compiler's cache had it; None where that is not known."""

    def __str__(self) -> str:
        size = "" if self.n_ops is None else f", {self.n_ops} ops"
        cache = {True: ", from the cache", False: ", not in the cache", None: ""}[self.cache_hit]
        return f"{self.region} in {number(self.seconds, '.2f', '')} s{size}{cache}"


@dataclass(frozen=True, kw_only=True)
class ParityChecked(Event):
    """A graph was run eagerly and compiled on its first real inputs."""

    region: str
    agrees: bool | None
    """None: not compared."""

    error: float
    """Largest absolute difference; NaN if not compared."""

    reason: str

    def __str__(self) -> str:
        if self.agrees is None:
            return f"{self.region} {self.reason}"
        verdict = "agrees with eager" if self.agrees else f"is NOT right: {self.reason}"
        return f"{self.region} {verdict}, largest difference {number(self.error, '.2g', '')}"


@dataclass(frozen=True, kw_only=True)
class SpeedUp(Event):
    """Compiled steps were measured against eager ones; a value above 1 is faster."""

    value: float
    low: float
    high: float
    n: int
    """Pairs of steps measured."""

    verdict: str
    confidence: float | None = None
    """Of the interval; ``None`` in a log of a version that did not write it."""

    def __str__(self) -> str:
        interval = _interval(self.low, self.high, self.confidence)
        return f"{self.verdict}: {number(self.value, '.2f', '')}x, {interval}, {self.n} pairs"


@dataclass(frozen=True, kw_only=True)
class PartTried(Event):
    """Steps without one part of the plan were compared with steps of all of it; above 1 the part helps."""

    part: str
    value: float
    low: float
    high: float
    n: int
    """Pairs of steps measured."""

    kept: bool
    confidence: float | None = None

    def __str__(self) -> str:
        what = "kept" if self.kept else "taken back"
        interval = _interval(self.low, self.high, self.confidence)
        return f"{self.part} {what}: {number(self.value, '.2f', '')}x with it, {interval}"


@dataclass(frozen=True, kw_only=True)
class ScopesRaced(Event):
    """Steps compiled with two scopes were timed against each other; above 1 what is kept is faster."""

    kept: str
    left: str
    value: float
    low: float
    high: float
    n: int
    """Pairs of steps measured."""

    confidence: float | None = None

    def __str__(self) -> str:
        interval = _interval(self.low, self.high, self.confidence, ".3f")
        return f"{self.kept} kept: {number(self.value, '.3f', '')}x as fast as {self.left}, {interval}"


@dataclass(frozen=True, kw_only=True)
class FusedTried(Event):
    """Updates by torch's fused kernel were compared with those of the loop; above 1 the kernel is faster."""

    optimizer: str
    value: float
    low: float
    high: float
    n: int
    """Pairs of updates measured."""

    kept: bool
    reason: str = ""
    """Why it was left, if it was."""

    confidence: float | None = None
    timed_before: str | None = None
    """When an earlier run has measured them, in UTC; None where this one has."""

    def __str__(self) -> str:
        if not self.kept:
            return f"{self.optimizer}: torch's fused kernel is left again: {self.reason}"
        measured = f"{number(self.value, '.2f', '')}x, {_interval(self.low, self.high, self.confidence)}"
        before = "" if self.timed_before is None else ", as an earlier run has measured it"
        return f"{self.optimizer}: torch's fused kernel is kept: {measured}{before}"


@dataclass(frozen=True, kw_only=True)
class Recompiled(Event):
    """A region was compiled once more than planned."""

    region: str
    reason: str

    def __str__(self) -> str:
        return f"{self.region}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """A region, or one step of it, ran eagerly though it was to run compiled."""

    region: str
    reason: str

    def __str__(self) -> str:
        return f"{self.region} runs eagerly: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Reverted(Event):
    """Everything compiled was taken out again."""

    reason: str

    def __str__(self) -> str:
        return f"back to eager: {self.reason}"


def _interval(low: float, high: float, confidence: float | None, digits: str = ".2f") -> str:
    percent = "" if confidence is None else f"{100 * confidence:g}% "
    return f"{percent}interval {number(low, digits, '')} to {number(high, digits, '')}"
