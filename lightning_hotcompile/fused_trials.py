"""One optimizer that is to be tried with torch's fused kernel, and one that is on trial."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from torch.optim import Optimizer

from lightning_hotcompile.fused_memory import Timed
from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.receipt.step_record import PairedUnits
from lightning_hotcompile.swap.dynamo import version_of
from lightning_hotcompile.swap.fused_step import FusedStep, Stage
from lightning_hotcompile.watch.stats import Ratio


@dataclass(kw_only=True, eq=False)
class Waiting:
    """An optimizer before its trial."""

    name: str
    optimizer: Optimizer
    known: Timed | None
    """What makes it faster for sure, so that it is not timed."""

    due: int
    """Steps of the training after which it is tried."""

    idle_at: int | None = None
    """How often its weights had been changed when its trial was put off, since it made no update."""

    def is_due(self, steps: int) -> bool:
        """Whether it is to be tried after so many steps."""
        return steps >= self.due and (self.idle_at is None or self.idle_at != changes_of(self.optimizer))


@dataclass(kw_only=True, eq=False)
class OnTrial:
    """An optimizer whose updates are made by the loop and by the kernel in turns."""

    name: str
    step: FusedStep
    pairs: PairedUnits
    known: Timed | None
    """What an earlier run has found, so that it is not timed."""

    idle: int = 0
    """Steps of the training without an update."""

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


def changes_of(optimizer: Optimizer) -> int:
    """How often its weights were changed in place until now."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return sum(version_of(weight) or 0 for weight in weights)


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
