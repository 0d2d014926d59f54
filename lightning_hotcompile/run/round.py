"""One plan with all that carries it out, and how a signature stood at its end."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.judge import Judge
from lightning_hotcompile.run.moves import Moves
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.swap.installation import OPTIMIZER
from lightning_hotcompile.watch.stats import Ratio
from lightning_hotcompile.watch.step_record import PairedUnits

CLEARLY_BETTER = 1.01
"""A later plan has to be so much faster than the best one before it; equal ones are not exchanged."""


class Round:
    """One plan, and all that is there to carry it out.

    Args:
        context: of the stage.
        plan: what is compiled once a step is hot.
        given: the decision to compile, where it was taken already.
    """

    def __init__(self, context: StageContext, plan: CompilePlan, given: Decision | None = None) -> None:
        context = context.for_plan(plan)
        self.plan = plan
        self.flip = Flip(context, plan)
        self.weighing = Weighing(context, plan, self.flip)
        self.judge = Judge(context, self.flip, self.weighing, given)
        self.moves = Moves(context, plan, self.flip, self.judge)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a signature stood at the end of a round."""

    round: Round
    state: State
    pairs: PairedUnits

    @property
    def name(self) -> str:
        """Of the plan."""
        return self.round.plan.name

    @property
    def is_in_use(self) -> bool:
        """Whether its compiled code was kept."""
        return self.state.phase is Phase.STEADY

    @property
    def ratio(self) -> Ratio | None:
        """Eager time / compiled time, if it is in use and was measured."""
        return self.pairs.ratio() if self.is_in_use else None

    @property
    def speedup(self) -> float:
        """Eager time / compiled time, 1 where eager is what is left of the plan."""
        return 1.0 if self.ratio is None else self.ratio.value

    def is_more_than(self, other: Result) -> bool:
        """Whether it is the same with more optimizers, and both are in use."""
        return self.is_in_use and other.is_in_use and self.round.plan.is_more_than(other.round.plan)

    def was_compared_with(self, other: Result) -> bool:
        """Whether steps with and without its optimizers took turns, while the plan was refined."""
        return self.state.refined and self.is_more_than(other)

    def is_better_than(self, best: Result) -> bool:
        """Whether a later plan takes the place of the best one before it.

        One that is the same with more optimizers has to have been held against it directly.
        """
        if self.is_more_than(best):
            return self.was_compared_with(best) and OPTIMIZER in self.round.flip.installation.parts
        return self.speedup > best.speedup * CLEARLY_BETTER

    def is_about_as_fast_as(self, best: Result) -> bool:
        """Whether their ratios, each to eager steps of its own, leave open which of two plans is faster."""
        mine, its, modes = self.ratio, best.ratio, {self.round.plan.mode, best.round.plan.mode}
        if mine is None or its is None or modes != {None} or self.is_more_than(best):
            return False
        return mine.low <= its.high and its.low <= mine.high
