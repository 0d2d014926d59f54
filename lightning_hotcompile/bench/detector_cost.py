"""What watching costs: microseconds a step at rest, and how much slower an observed step is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import lightning as L
from lightning import LightningModule

from lightning_hotcompile.bench.cases import CASES, Case
from lightning_hotcompile.bench.measurement import ArmResult, Measurement, Request
from lightning_hotcompile.bench.quiet import train
from lightning_hotcompile.bench.workloads.workload import EAGER
from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.run.step_watch import recorded_step
from lightning_hotcompile.watch.detector import StepDetector
from lightning_hotcompile.watch.signature import SignatureReader
from lightning_hotcompile.watch.stats import summarize

WATCHED = "watched"
OBSERVED = 10
"""Steps of a fit that are watched."""

RECORDED = recorded_step(OBSERVED + 1) - 1
"""The one of them, from 0, that is recorded operation by operation."""

LOOPS = 5_000


class StepTimer(L.Callback):
    """Times the first steps, other callbacks' hooks included, and ends the fit after them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = 0.0

    def begin(self) -> L.Callback:
        """The callback that goes first: its hook starts the clock."""
        timer = self

        class Begin(L.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                timer.begun = time.perf_counter()

        return Begin()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The callback that goes last: its hook stops the clock."""
        self.seconds.append(time.perf_counter() - self.begun)
        trainer.should_stop = len(self.seconds) >= OBSERVED


def measure(request: Request) -> Measurement:
    """Fits with and without the callback in turns; nothing is compiled in either.

    The sample of one fit is the mean of its first steps but the recorded one. ``recorded_ms`` is what that
    one took more than in the plain fit beside it (median), ``detector_us`` the median of a tight loop over
    signature and detector for one batch of the case, ``at_rest_us`` what the callback's hooks take in a step
    that uses compiled code.
    """
    case = CASES[request.sizes["model"]]
    arms = {EAGER: ArmResult(compiled=False), WATCHED: ArmResult(compiled=False)}
    recorded_ms: list[float] = []
    begin = time.perf_counter()
    for i in range(request.rounds + 1):
        found: dict[str, list[float]] = {}
        for name in arms if i % 2 == 0 else reversed(arms):
            callbacks = [HotCompile(threshold=OBSERVED + 1)] if name == WATCHED else []
            found[name] = observed_seconds(case, callbacks)
        if i:  # the first pair warms up the machine
            recorded_ms.append(1e3 * (found[WATCHED].pop(RECORDED) - found[EAGER].pop(RECORDED)))
            for name, seconds in found.items():
                arms[name].laps.setdefault("step", []).append(fmean(seconds))
        if i >= 10 and time.perf_counter() - begin > request.seconds:
            break
    arms[WATCHED].extra.update(
        recorded_ms=median(recorded_ms), detector_us=detector_us(case), at_rest_us=at_rest_us(case)
    )
    return Measurement(arms=arms, parameters=sum(p.numel() for p in case.model().parameters()))


def detector_us(case: Case, loops: int = LOOPS) -> float:
    """Microseconds that signature and detector take for one step."""
    reader, detector = SignatureReader(case.model()), StepDetector(threshold=10)
    batch = next(iter(case.batches()))
    samples = []
    for _ in range(loops):
        start = time.perf_counter()
        signature = reader.read(batch)
        detector.begin_step(signature)
        detector.end_step()
        samples.append(1e6 * (time.perf_counter() - start))
    return summarize(samples).median


class TimedHooks(L.Callback):
    """Times the hooks of the class beside it, step by step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.microseconds: list[float] = []
        self._spent = 0.0

    def counts(self) -> bool:
        """Whether the step that has ended is one to keep."""
        return True

    def on_train_batch_start(self, *args: Any) -> None:
        """Time it; it is the first of a step."""
        start = time.perf_counter()
        super().on_train_batch_start(*args)
        self._spent = time.perf_counter() - start

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Time it."""
        start = time.perf_counter()
        super().on_before_optimizer_step(*args)
        self._spent += time.perf_counter() - start

    def on_train_batch_end(self, *args: Any) -> None:
        """Time it; it is the last of a step."""
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self._spent += time.perf_counter() - start
        if self.counts():
            self.microseconds.append(1e6 * self._spent)


class TimedHotCompile(TimedHooks, HotCompile):
    """Those of HotCompile, once it is steady."""

    def counts(self) -> bool:
        """Whether it is at rest."""
        return self.phase == "steady"


def at_rest_us(case: Case, steps: int = 200) -> float:
    """Microseconds that the callback's hooks take in a steady step, in between real ones: median.

    Less what the same clock shows around the hooks of a callback that does nothing, in a fit of its own.
    Nothing is compiled by Inductor for it: graphs run as they were captured.
    """
    keeps_all = {"backend": "eager", "cost_gate": False, "min_speedup": 0.0, "threshold": 2, "store": None}
    hot = TimedHotCompile(**keeps_all, scope="step", compile_optimizer=False, parity="off")
    nothing = TimedHooks()
    for timed in (hot, nothing):
        _fit(case, [timed], SETTLING_STEPS + steps)
    return summarize(hot.microseconds).median - summarize(nothing.microseconds[SETTLING_STEPS:]).median


SETTLING_STEPS = 100
"""More than a step signature takes to be steady, where anything is kept."""


_LONG = 1_000_000
"""Steps that a fit is given: in one as short as those that are timed no step would be recorded."""


def observed_seconds(case: Case, callbacks: Sequence[L.Callback]) -> list[float]:
    """Seconds of each of the first steps of a fit that is ended after them.

    Raises:
        RuntimeError: the callback has recorded no step, so this is not what watching costs.
    """
    timer = StepTimer()
    _fit(case, [timer.begin(), *callbacks, timer], _LONG)
    for callback in callbacks:
        if isinstance(callback, HotCompile) and not _has_recorded(callback.report):
            raise RuntimeError(
                f"no step of {case.name} was recorded: {callback.report.phase}, {callback.report.decision}"
            )
    return timer.seconds


def _has_recorded(report: Report) -> bool:
    return [sample.step for sample in report.samples if sample.note == "recorded"] == [RECORDED + 1]


def _fit(case: Case, callbacks: list[L.Callback], steps: int) -> None:
    train(case.model(), case.batches(), callbacks, max_steps=steps)
