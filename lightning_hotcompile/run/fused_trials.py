"""One optimizer that is to be tried with torch's fused kernel, and one that is on trial."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from torch.optim import Optimizer

from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.run.fused_memory import Timed
from lightning_hotcompile.swap.optimizers.fused_step import FusedStep, Stage
from lightning_hotcompile.watch.stats import Ratio
from lightning_hotcompile.watch.step_record import PairedUnits

MOST_IDLE = 16
"""Units of steps without any update after which a trial is put off until there is one, the first time.

A second optimizer may start late, or be none that the training uses, and nothing is compiled during a trial.
The next time it is twice as many: some make an update in each twentieth step only.
"""


class UntilUpdate:
    """Waits for the next update that an optimizer makes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_over = False
        self._handle = optimizer.register_step_post_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.is_over = True  # the hook stays until the next step: torch is iterating over all of them

    def end(self) -> None:
        """Wait no longer; a second call does nothing."""
        self._handle.remove()


@dataclass(kw_only=True, eq=False)
class Waiting:
    """An optimizer before its trial."""

    name: str
    optimizer: Optimizer
    known: Timed | None
    """What makes it faster for sure, so that it is not timed."""

    due: int
    """Steps of the training after which it is tried."""

    most_idle: int = MOST_IDLE
    """Units of steps without an update after which its trial is put off."""

    until_update: UntilUpdate | None = None
    """Its trial was put off: it goes on once there is an update."""

    @property
    def is_put_off(self) -> bool:
        """Whether it waits for an update, be it for ever."""
        return self.until_update is not None and not self.until_update.is_over

    def is_due(self, steps: int) -> bool:
        """Whether it is to be tried after so many steps."""
        return steps >= self.due and not self.is_put_off


@dataclass(kw_only=True, eq=False)
class OnTrial:
    """An optimizer whose updates are made by the loop and by the kernel in turns."""

    name: str
    step: FusedStep
    pairs: PairedUnits
    known: Timed | None
    """What an earlier run has found, so that it is not timed."""

    most_idle: int
    """As of the one that was waiting."""

    steps: int = 0
    """Of the training, since it began."""

    idle: int = 0
    """Units of these without an update."""

    looks: int = 0
    ratio: Ratio | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was decided."""
        return self.step.stage in (Stage.KEPT, Stage.LEFT)

    @property
    def loop_s(self) -> float | None:
        """Seconds of an update by the loop; ``None`` where it was not timed."""
        if self.known is not None:
            return self.known.loop_s
        return median(self.pairs.eager) if self.pairs.n else None

    @property
    def fused_s(self) -> float | None:
        """The same by the kernel."""
        if self.known is not None:
            return self.known.fused_s
        return median(self.pairs.compiled) if self.pairs.n else None

    @property
    def saves_s(self) -> float:
        """Seconds by which the kernel is faster, as far as is known."""
        return (self.loop_s or 0.0) - (self.fused_s or 0.0)


def told(trial: OnTrial) -> FusedOptimizer:
    """A trial as the receipt has it."""
    step = trial.step
    return FusedOptimizer(
        name=trial.name,
        class_name=type(step.optimizer).__name__,
        kept=step.stage is Stage.KEPT,
        reason=step.reason,
        loop_ms=None if trial.loop_s is None else 1e3 * trial.loop_s,
        fused_ms=None if trial.fused_s is None else 1e3 * trial.fused_s,
        speedup=trial.ratio,
        runs=step.runs,
        timed_before=None if trial.known is None else trial.known.when,
    )
