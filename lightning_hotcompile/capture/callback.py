"""The callback that captures: times all steps, and lets the profiler look at some of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from torch.profiler import profile, record_function

from lightning_hotcompile.capture.analysis import STEP_NAME
from lightning_hotcompile.capture.order import (
    EVENTS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    Order,
    Window,
)
from lightning_hotcompile.capture.summary import to_json
from lightning_hotcompile.capture.verdict import DECIDED, companions
from lightning_hotcompile.either_lightning import Callback
from lightning_hotcompile.errors import warn
from lightning_hotcompile.receipt.samples import StepSamples
from lightning_hotcompile.view.captured import Captured
from lightning_hotcompile.watch.clock import StepClock


class Capture(Callback):
    """Writes a profiler's trace of some steps, the time of all steps, and HotCompile's report and events.

    The first training of the first Trainer is captured, on rank zero.

    Args:
        order: what to capture.
        companion: the class of the callback whose decision is awaited; it has ``phase``, ``report``
            and ``from_environment``.
        now: a clock in seconds.
    """

    def __init__(
        self, order: Order, companion: type[Callback], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._order = order
        self._companion_type = companion
        self._now = now
        self._window = Window(order)
        self._steps = StepSamples()
        self._profiler: profile | None = None
        self._annotation: Any = None
        self._clock: StepClock | None = None
        self._companion: Any = None
        self._device = "cpu"
        self._step = 0
        self._elapsed = 0.0
        self._profiled = 0
        self._another: str | None = None
        """Why the profiler cannot be used: torch has one for all."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin, unless another Trainer has been captured before."""
        if not trainer.is_global_zero or not self._claim():
            return
        self._device = pl_module.device.type
        self._clock = StepClock(device_type=self._device, now=self._now)
        self._companion = next(iter(companions(trainer, self._companion_type)), None)
        profiler = type(trainer.profiler)  # type: ignore[attr-defined]
        if any(base.__name__ == "PyTorchProfiler" for base in profiler.__mro__):
            self._do_without(f"the Trainer has torch's profiler itself ({profiler.__name__})")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The profiler is started before the step is timed: that takes seconds on an accelerator."""
        if self._clock is None:
            return
        if self._another is None and self._window.opens(self._now(), decided=self._is_decision_over()):
            self._start_profiler()
        if self._window.is_open:
            self._annotation = record_function(STEP_NAME)
            self._annotation.__enter__()
        self._clock.start("profiled" if self._window.is_open else "")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; after the last step that was asked for, write the trace."""
        if self._clock is None:
            return
        self._clock.stop()
        self._leave_step()
        if self._window.is_open:
            self._profiled += 1
            if self._window.closes(self._now()):
                self._stop_profiler()
        self._book()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what was captured, also if the training was shorter than asked for."""
        self._finish()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write what was captured so far, and the report as far as it got: there may be no teardown."""
        self._finish()
        self._write_report()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write HotCompile's report and events, which are complete by now."""
        self._write_report()

    def _write_report(self) -> None:
        companion, self._companion = self._companion, None
        if companion is not None:
            with self._told("the report"):
                report, log = companion.report, self._file(EVENTS_FILE)
                self._file(REPORT_FILE).write_text(report.to_json(), encoding="utf-8")
                if not log.exists():  # the script's own HotCompile writes it elsewhere, or not at all
                    lines = "".join(f"{json.dumps(event)}\n" for event in report.events)
                    log.write_text(lines, encoding="utf-8")

    def __getstate__(self) -> dict[str, Any]:
        """A copy captures nothing: a profiler cannot be copied, and there is one training to look at."""
        return {**self.__dict__, "_profiler": None, "_annotation": None, "_clock": None, "_companion": None}

    def _claim(self) -> bool:
        try:
            with open(self._file(SUMMARY_FILE), "x"):
                return True
        except FileExistsError:
            return False
        except OSError as error:
            warn(f"{self._order.folder!r} cannot be written, so nothing is captured: {error}")
            return False

    def _is_decision_over(self) -> bool:
        """Of an order that waits for a decision: whether there is one, or nobody to make it."""
        return self._order.after_decision and (self._companion is None or self._has_decided())

    def _has_decided(self) -> bool:
        return self._companion is not None and self._companion.phase in DECIDED

    def _leave_step(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _book(self) -> None:
        assert self._clock is not None
        for done in self._clock.drain():
            self._step += 1
            start = self._elapsed + done.wait_seconds
            self._steps.add(self._step, start, done.seconds, ("training", False, True, str(done.tag)))
            self._elapsed = start + done.seconds

    def _start_profiler(self) -> None:
        if _is_profiling():
            self._do_without("the script has a profiler at work")
            return
        try:
            profiler = profile()  # all kinds of activity that there are
            profiler.start()
        except RuntimeError as error:
            self._do_without(str(error))
        else:
            self._profiler = profiler

    def _do_without(self, reason: str) -> None:
        self._window.is_over = True
        self._profiled = 0
        self._another = f"the profiler saw no step: {reason}"
        warn(f"{self._another}; steps are timed without it.")

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None and not _is_profiling():
            self._do_without("the script has begun to profile meanwhile")
        elif profiler is not None:
            with self._told("the trace"):
                profiler.stop()
                profiler.export_chrome_trace(str(self._file(TRACE_FILE)))

    def _finish(self) -> None:
        if self._clock is None:
            return
        self._leave_step()
        self._stop_profiler()
        with self._told("the last steps"):
            if self._device != "cpu":
                torch.accelerator.synchronize()  # training is over: now waiting harms nobody
            self._book()
        self._clock = None
        with self._told("the summary"):
            self._file(SUMMARY_FILE).write_text(to_json(self._captured()), encoding="utf-8")

    def _captured(self) -> Captured:
        return Captured(
            command=self._order.command,
            versions={"torch": torch.__version__, "lightning": lightning.__version__},
            device=self._device,
            profiled_steps=self._profiled,
            notes=() if self._profiled else (self._why_nothing(),),
            steps=self._steps.samples(),
        )

    def _why_nothing(self) -> str:
        if self._another is not None:
            return self._another
        if self._order.after_decision and not self._has_decided():
            return "the profiler saw no step: HotCompile did not come to a decision before training ended"
        return f"the profiler saw no step: training ended after {self._step} steps"

    def _file(self, name: str) -> Path:
        return Path(self._order.folder, name)

    @contextlib.contextmanager
    def _told(self, what: str) -> Any:
        """A training is not stopped for its capture."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            warn(f"{what} of the capture in {self._order.folder!r} could not be written: {error}")


def _is_profiling() -> bool:
    """Whether any profiler is at work: torch has one for all, and who begins ends that of the other."""
    return torch._C._autograd._profiler_enabled()
