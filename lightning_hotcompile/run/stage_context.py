"""What everything that carries out plans in one stage of a Trainer call works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.run.memory import Memory
from lightning_hotcompile.run.side_gains import SideGains
from lightning_hotcompile.run.step_watch import StepWatch
from lightning_hotcompile.swap.shared import Shared
from lightning_hotcompile.together import Together


@dataclass(frozen=True, kw_only=True, eq=False)
class StageContext:
    """The same for all plans of the stage, but for Inductor's mode."""

    trainer: Trainer
    module: LightningModule
    config: HotCompileConfig
    stage: str
    """``train`` or another stage of the Trainer."""

    watch: StepWatch
    """Knows all signatures, and the operations of a step."""

    ledger: Ledger
    """Knows what steps take, and books what compiling costs."""

    story: Story
    """Is told of each change."""

    memory: Memory
    """Knows what earlier runs have learned."""

    side: SideGains
    """Knows whether something else is on trial now."""

    together: Together
    """What the ranks have agreed on."""

    shared: Shared
    """What the installations of all plans share."""

    child_limit_s: float | None
    """Seconds that a child process may take for a graph: nobody waits for it in a collective, so it may be
    longer than what a compile in the step may take; ``None`` for no limit."""

    now: Callable[[], float]
    """A clock in seconds."""

    def for_plan(self, plan: CompilePlan) -> StageContext:
        """The same with the mode of a plan, if it has one of its own."""
        return self if plan.mode is None else replace(self, config=replace(self.config, mode=plan.mode))
