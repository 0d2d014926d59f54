"""Adds up what the steps took, phase by phase, and what compiling cost and saved."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median

from lightning_hotcompile.receipt.report import PhaseStats
from lightning_hotcompile.receipt.samples import StepSamples
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.stats import Summary, summarize
from lightning_hotcompile.watch.step_record import PairedUnits, StepRecord

_FEW = 16
"""Steps beside a child process that say how fast they are."""


def _window() -> deque[float]:
    """The last samples of one kind."""
    return deque(maxlen=512)


@dataclass(kw_only=True)
class _PhaseTotal:
    steps: int = 0
    seconds: float = 0.0
    times: deque[float] = field(default_factory=_window)


class _OwnTime:
    """Adds what goes by while it is entered to the callback's own time, less what is booked as installing.

    It is entered several times a step, never within itself.
    """

    __slots__ = ("_installed_s", "_ledger", "_now", "_start")

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._now = now
        self._start = self._installed_s = 0.0

    def __enter__(self) -> None:
        self._start, self._installed_s = self._now(), self._ledger.install_s

    def __exit__(self, *_: object) -> None:
        ledger = self._ledger
        ledger.own_s += self._now() - self._start - (ledger.install_s - self._installed_s)


class Ledger:
    """The accounts of one fit, in seconds.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._phases: defaultdict[str, _PhaseTotal] = defaultdict(_PhaseTotal)
        self._eager = self._eager_before = _window()
        self._compiled = _window()
        self._compiled_seconds = 0.0
        self._banked_s = 0.0
        self._stalled: list[float] = []
        self._slowed: list[float] = []  # recorded, or with fewer threads
        self._recent: float | None = None
        self._between = self._away = self._longest_wait_s = 0.0
        self._in_steps = 0.0
        self._before_first_s = 0.0
        self.install_s = 0.0
        self.own_s = 0.0
        self.own_time = _OwnTime(self, now)
        """What is done within it is the callback's own doing; installing is booked apart."""

        self.saved_besides_s: Callable[[], float | None] = lambda: None
        """Tells how many seconds something else than compiled code has saved, ``None`` where nothing has."""
        self.steps = 0
        self.samples = StepSamples()
        self.flip_step: int | None = None
        self.pairs = PairedUnits()

    def add(self, time: StepTime, record: StepRecord) -> None:
        """Book one finished step."""
        if self.steps == 0:
            self._before_first_s = self.install_s  # the first step has no time before it
        self.steps += 1
        start_s = self._in_steps + self._between + time.wait_seconds
        self.samples.add(self.steps, start_s, time.seconds, record.kind)
        self._recent = time.seconds
        self._in_steps += time.seconds
        self._between += time.wait_seconds
        self._away += time.away_seconds
        self._longest_wait_s = max(self._longest_wait_s, time.wait_seconds, time.away_seconds)
        phase = self._phases[record.phase]
        phase.steps += 1
        phase.seconds += time.seconds
        if record.stalled:
            self._stalled.append(time.seconds)
        elif record.recorded or record.slowed:
            self._slowed.append(time.seconds)
        elif record.compiled:
            self._compiled_seconds += time.seconds
        if not record.disturbed:
            phase.times.append(time.seconds)
            (self._compiled if record.compiled else self._eager).append(time.seconds)
        if record.pairs is not None:
            record.pairs.add(record, time.seconds)

    def skip(self, steps: int, seconds: float, between_s: float, phase: str, *, compiled: bool) -> None:
        """Book steps that were not timed one by one.

        Args:
            steps: how many.
            seconds: from their starts to their ends, by the host's clock.
            between_s: from their ends to the starts of those after them. An accelerator works on
                meanwhile: of that they have what they usually have, but no pause (a checkpoint).
            phase: of all of them.
            compiled: whether they ran compiled code.
        """
        usual_s, total = self._compiled_step_s if compiled else self.eager_step_s, self._phases[phase]
        theirs_s = (seconds + between_s) * (1 - (self.wait_share or 0.0))
        in_steps = max(seconds, min(theirs_s, steps * (usual_s or 0.0)))
        self.steps, total.steps = self.steps + steps, total.steps + steps
        self._in_steps += in_steps
        self._between += seconds + between_s - in_steps
        self._recent = in_steps / steps
        total.seconds += in_steps
        self._compiled_seconds += in_steps * compiled

    def forget_eager_steps(self) -> None:
        """Eager steps take another time from now on; until one was timed, that of those before counts."""
        if self._eager:
            self._eager_before, self._eager = self._eager, _window()

    def end_round(self, gain: float | None = None) -> None:
        """Compiled steps until now count at the speed-up of the plan that they ran.

        Or at another gain: seconds that eager takes longer, per second of compiled steps.
        """
        self._banked_s += self._compiled_seconds * ((self._gain or 0.0) if gain is None else gain)
        self._compiled_seconds = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds in steps so far."""
        return self._in_steps

    @property
    def recent_step_ms(self) -> float | None:
        """Milliseconds of the last step that was booked."""
        return None if self._recent is None else 1e3 * self._recent

    @property
    def eager_step_s(self) -> float | None:
        """Median of an undisturbed eager step."""
        known = self._eager or self._eager_before
        return summarize(known).median if known else None

    @property
    def _compiled_step_s(self) -> float | None:
        """The same of a compiled one."""
        return summarize(self._compiled).median if self._compiled else None

    @property
    def beside_child_s(self) -> float | None:
        """Median of the last steps with fewer threads; ``None`` while there are few of them."""
        last = self._slowed[-_FEW:]
        return median(last) if len(last) == _FEW else None

    @property
    def eager_ms(self) -> Summary | None:
        """Eager steps; the interleaved ones if there are any, so that both arms saw the same machine."""
        return _in_ms(self.pairs.eager or self._eager or self._eager_before)

    @property
    def compiled_ms(self) -> Summary | None:
        """Compiled steps; the interleaved ones if there are any."""
        return _in_ms(self.pairs.compiled or self._compiled)

    @property
    def stall_s(self) -> float:
        """Time in which training stood still: warm-up, and steps that compiled, beyond an eager step."""
        return self.install_s + self._beyond_usual(self._stalled)

    @property
    def costs_s(self) -> float:
        """All that the callback added to the run."""
        return self.stall_s + self.own_s + self._beyond_usual(self._slowed)

    def _beyond_usual(self, seconds: list[float]) -> float:
        usual = self.eager_step_s or 0.0
        return sum(max(0.0, s - usual) for s in seconds)

    @property
    def _gain(self) -> float | None:
        """Seconds that eager takes longer, per second of compiled steps: the paired ratio less one."""
        ratio, eager, compiled = self.pairs.ratio(), self.eager_ms, self.compiled_ms
        if ratio is not None:
            return ratio.value - 1
        return None if eager is None or compiled is None else eager.median / compiled.median - 1

    @property
    def saved_s(self) -> float | None:
        """Time that compiled steps and fused kernels saved, less all costs; ``None`` without any of them."""
        gain, besides_s = self._gain, self.saved_besides_s()
        if gain is None and besides_s is None:
            return None
        return self._banked_s + self._compiled_seconds * (gain or 0.0) + (besides_s or 0.0) - self.costs_s

    @property
    def total_speedup(self) -> float | None:
        """Time of all steps and of what went by between them, had all been eager, over the time it took."""
        took_s, saved_s = self._before_first_s + self._in_steps + self._between, self.saved_s
        return None if saved_s is None or took_s <= 0 else max(0.0, took_s + saved_s) / took_s

    @property
    def break_even_step(self) -> int | None:
        """The batch at which the costs are earned back, ``None`` if never or unknown."""
        gain, compiled_s = self._gain, self._compiled_step_s
        if gain is None or gain <= 0 or compiled_s is None or self.flip_step is None:
            return None
        return self.flip_step + math.ceil(self.costs_s / (gain * compiled_s))

    @property
    def wait_share(self) -> float | None:
        """Share of the time between steps, the callback's own left out, in all of the time."""
        total = self._in_steps + self._between
        own_s = self.own_s + self.install_s - self._before_first_s
        return max(0.0, self._between - own_s) / total if total > 0 else None

    @property
    def wait_s(self) -> float:
        """Seconds from a step to the next, on average, evaluation included.

        The longest pause is left out: it may have come once for all.
        """
        passed_s = self._between + self._away - self._longest_wait_s
        return max(0.0, passed_s) / self.steps if self.steps else 0.0

    @property
    def own_us(self) -> float | None:
        """Microseconds of the callback's own code per step, installing left out."""
        return 1e6 * self.own_s / self.steps if self.steps else None

    def phases(self) -> tuple[PhaseStats, ...]:
        """Statistics per phase, in order of first use."""
        return tuple(_phase_stats(name, total) for name, total in self._phases.items())


def _phase_stats(name: str, total: _PhaseTotal) -> PhaseStats:
    summary = _in_ms(total.times)
    return PhaseStats(
        name=name,
        steps=total.steps,
        median_ms=None if summary is None else summary.median,
        iqr_ms=None if summary is None else summary.iqr,
        total_s=total.seconds,
    )


def _in_ms(seconds: Collection[float]) -> Summary | None:
    return summarize([1e3 * s for s in seconds]) if seconds else None
