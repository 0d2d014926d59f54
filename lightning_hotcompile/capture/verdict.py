"""The callback that waits for HotCompile's verdict, writes its report, and ends the script."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_hotcompile.capture.ending import end_training, write_whole
from lightning_hotcompile.capture.explaining import with_scope
from lightning_hotcompile.capture.order import VERDICT_FILE, WorthOrder
from lightning_hotcompile.either_lightning import CHECKPOINTS, Callback

DECIDED = ("steady", "declined", "reverted")

ASKED_EVERY = 10
"""Steps; asking takes time, and lets ranks wait for each other that would not."""


class AwaitVerdict(Callback):
    """Ends the training at HotCompile's verdict or at a limit; without either it goes on to its own end.

    A HotCompile that the script has in its code keeps its options, but compiles without a forecast, and has
    no store of its own.

    Args:
        order: the limits, the options, and where to write.
        companion: the class of the callback that measures.
        remaining: batches that the training has in all, ``None`` if unknown.
        now: a clock in seconds.
    """

    def __init__(
        self,
        order: WorthOrder,
        companion: type[Callback],
        remaining: Callable[[pl.Trainer], int | None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._order = order
        self._companion_type = companion
        self._remaining = remaining
        self._now = now
        self._companion: Any = None
        self._planned: int | None = None
        self._since = 0.0
        self._steps = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the options of each HotCompile, before any of them has planned."""
        for callback in companions(trainer, self._companion_type):
            config = replace(callback.config, cost_gate=False, prewarm=False, store="auto")
            if self._order.backend is not None:
                config = replace(config, backend=self._order.backend)
            callback.config = with_scope(config, self._order.scope) if self._order.scope else config

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to wait; the script's own HotCompile is the one that measures."""
        self._companion = next(iter(companions(trainer, self._companion_type)), None)
        self._planned = self._remaining(trainer)
        self._since, self._steps = self._now(), 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the training, if this was the last batch that is needed."""
        if self._companion is None:
            return
        self._steps += 1
        ended = self._why_to_end()
        if trainer.world_size > 1:
            ended = self._agreed(trainer, ended)
        if ended is None:
            return
        self._write(trainer, ended, stopped=True)
        end_training(trainer, but_for=CHECKPOINTS)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The training was shorter than it would have had to be, or ended before ranks asked each other."""
        if self._companion is not None:
            is_decided = self._companion.phase in DECIDED
            ended = "" if is_decided else f"the training ended after {self._steps:,} steps"
            self._write(trainer, ended, stopped=False)

    def _why_to_end(self) -> str | None:
        order, seconds = self._order, self._now() - self._since
        if self._companion.phase in DECIDED:
            return ""
        if order.max_steps is not None and self._steps >= order.max_steps:
            return f"the limit of {order.max_steps:,} steps (--max-steps) was reached"
        if seconds >= order.max_seconds:
            return f"the limit of {order.max_seconds / 60:g} minutes (--max-minutes) was reached"
        return None

    def _agreed(self, trainer: pl.Trainer, ended: str | None) -> str | None:
        """All ranks end at the same step; they count alike, and ask each other at some steps only."""
        if self._steps % ASKED_EVERY and self._steps != self._order.max_steps:
            return None
        ends = trainer.strategy.reduce_boolean_decision(ended is not None, all=False)
        return "another rank has ended the training" if ends and ended is None else ended

    def _write(self, trainer: pl.Trainer, ended: str, *, stopped: bool) -> None:
        """The report as it stands, why it is no verdict (or ''), and how long the training would be."""
        companion, self._companion = self._companion, None
        record = {
            "ended": ended,
            "stopped": stopped,
            "planned_steps": self._planned,
            "report": companion.report.to_dict(),
        }
        if trainer.is_global_zero:
            write_whole(Path(self._order.folder, VERDICT_FILE), json.dumps(record))


def companions(trainer: pl.Trainer, kind: type[Callback]) -> list[Any]:
    """The Trainer's callbacks of this class. Those in the script's own code come first: they do the work."""
    found: list[Any] = [c for c in trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]
    return sorted(found, key=lambda callback: bool(callback.from_environment))
