"""Asks the forecast about one plan: what it would cost and save in this run, by all that is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from statistics import median

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.plan.compile_cost import START_ON_ACCELERATOR_S, assumed_compile_s
from lightning_hotcompile.plan.forecast import (
    WARM_SHARE,
    Child,
    Decision,
    Expectation,
    expected_speedup,
    forecast,
    forgone_s,
    too_short,
)
from lightning_hotcompile.plan.one_more import GAIN_OF_ONE_MORE, GAIN_OVER_KERNEL, worth_one_more
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.run.stages import remaining_batches
from lightning_hotcompile.run.trainer_facts import device_type
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.swap.dynamo import graph_count
from lightning_hotcompile.swap.prewarm.choice import Surroundings, crowding, slowed_share
from lightning_hotcompile.tracks import Track

_ASKED_EVERY = 16
"""Steps beside a child process from one question to the next: nothing changes fast."""

_OVERDUE = 0.5
"""A child that is over the time that was expected is taken to need half as much again as it has taken."""


class Weighing:
    """What compiling a plan would cost and save, before anything compiles, and beside a child that does.

    Args:
        context: of the stage.
        plan: that would be compiled.
        flip: knows what is in place, and whether a child process could compile it.
    """

    _looks = 0
    """Questions beside a child process so far."""

    def __init__(self, context: StageContext, plan: CompilePlan, flip: Flip) -> None:
        self._trainer = context.trainer
        self._config = context.config
        self._plan = plan
        self._flip = flip
        self._watch = context.watch
        self._ledger = context.ledger
        self._stage = context.stage
        self._memory = context.memory

    def known(self, track: Track) -> Profile | None:
        """What an earlier run has found out that has measured this plan, or began with it."""
        known = self._memory.of(track.signature)
        return known if known is not None and self._plan.name in (known.scope, *known.tried) else None

    def may_pay(self, plan: CompilePlan | None = None) -> bool:
        """Whether compiling could pay if it gained very much: else no step is recorded, which takes time.

        Of this plan, or of another one.
        """
        return self.too_short(plan) is None

    def too_short(self, plan: CompilePlan | None = None) -> Decision | None:
        """The decision against compiling in a run that could not even load the code; ``None`` if it could.

        It is asked in a step, so the store is not: what this machine has taken before may be half as much.
        """
        step_s, plan = self._ledger.eager_step_s, plan or self._plan
        if not self._config.cost_gate or step_s is None:
            return None
        least = plan.without_optimizers() or plan  # loading takes no longer for a mode that times kernels
        return too_short(
            remaining_steps=self._left(step_s),
            step_s=step_s,
            load_s=WARM_SHARE * assumed_compile_s(least.regions, has_toolchain=True),
        )

    def _left(self, step_s: float | None) -> int | None:
        """Batches that are left, at so many seconds a step and as much between them as until now."""
        batch_s = None if step_s is None else step_s + self._ledger.wait_s
        return remaining_batches(self._trainer, self._stage, batch_s)

    @property
    def _on_cpu(self) -> bool:
        """Where the prior was measured: elsewhere a short step says nothing about the gain."""
        return device_type(self._trainer.lightning_module) == "cpu"

    def forecast(self, track: Track) -> Decision:
        """Whether to compile, and why; what an earlier run has taken back is not tried again."""
        if not self._config.cost_gate:
            return Decision(go=True, reason="cost_gate=False: compiled without a forecast")
        step_s, known = self._ledger.eager_step_s, self.known(track)
        if known is not None and known.verdict == "bad":
            return Decision(go=False, reason=f"an earlier run ({known.when[:10]}) found: {known.reason}")
        if step_s is None and self._config.threshold == 0:
            return Decision(go=True, reason="threshold=0: compiled before a step was measured")
        return forecast(
            remaining_steps=self._left(step_s),
            step_s=_usual_step_s(known, step_s),
            expected=replace(self._expectation(track, known, step_s), share=self._watch.share_of(track)),
            spent_s=self._ledger.spent_s,
            or_inline=self._config.prewarm is not True,
        )

    def _for_runs_to_come(self, track: Track, expected: Expectation) -> Expectation:
        return replace(
            expected,
            forgone_s=self._memory.forgone_s(track.signature),
            is_lasting=self._memory.is_lasting(track.signature),
        )

    def weighed(self, track: Track) -> Decision | None:
        """What this plan is expected to cost and save; ``None`` before the step is hot, or if it is known."""
        weighs = self._config.cost_gate and self._config.threshold > 0
        return self.forecast(track) if weighs and track.hot and self.known(track) is None else None

    def too_dear(self, track: Track) -> Decision | None:
        """The decision against a child process that is at work; ``None`` where it still pays, or may.

        How far training falls behind meanwhile is assumed before it begins, and seen then: the child has a
        core of its own, but not the memory and the caches.
        """
        self._looks += 1
        if not self._config.cost_gate or self._looks % _ASKED_EVERY:
            return None
        step_s, beside_s = self._ledger.eager_step_s, self._ledger.beside_child_s
        if step_s is None or beside_s is None:
            return None
        left, prewarm = self._left(step_s), self._flip.ahead.prewarm
        if left is None or prewarm is None or not prewarm.is_slowing:
            return None
        elapsed_s, ops = prewarm.elapsed_s, self._watch.op_statistics
        whole_s = self._memory.child_s(self._plan, self._flip.ahead.crowding, ops)
        child = Child(
            seconds=max(whole_s - elapsed_s, _OVERDUE * elapsed_s), slowed=max(0.0, 1 - step_s / beside_s)
        )
        found = self._for_runs_to_come(track, self._assumed(self.known(track), step_s))
        expected = replace(found, child=child, share=self._watch.share_of(track))
        decision = forecast(remaining_steps=left, step_s=step_s, expected=expected)
        if decision.go:
            return None
        reason = (
            f"stopped a child process that compiled for {elapsed_s:.0f} s, since steps took "
            f"{1e3 * beside_s:.3g} ms beside it: {decision.reason}"
        )
        return replace(decision, reason=reason)

    def too_late(self, track: Track) -> Decision | None:
        """The decision against a flip after a child process; ``None`` where it still pays.

        What the child cost is spent: what is weighed is loading its code, or compiling where it made none.
        """
        step_s, prewarm = self._ledger.eager_step_s, self._flip.ahead.prewarm
        left = self._left(step_s)
        if not self._config.cost_gate or step_s is None or left is None or prewarm is None:
            return None
        expected = self._for_runs_to_come(track, self._assumed(self.known(track), step_s))
        words = "no code yet"
        if prewarm.has_compiled:
            words = "its code is there"
            load_s = WARM_SHARE * self._assumed(None, step_s).compile_s
            expected = replace(expected, compile_s=min(expected.compile_s, load_s))
        expected = replace(expected, share=self._watch.share_of(track))
        decision = forecast(remaining_steps=left, step_s=step_s, expected=expected)
        reason = f"too late after a child process, {words}: {decision.reason}"
        return None if decision.go else replace(decision, reason=reason)

    def recompile_pays(self, track: Track) -> bool:
        """Whether compiling this plan once more is worth it, by what it has gained in this run."""
        step_s, ratio, config = self._ledger.eager_step_s, track.pairs.ratio(), self._config
        if not config.cost_gate or config.min_speedup == 0 or step_s is None or ratio is None:
            return True
        left = self._left(step_s)
        cost_s = self._assumed(None, step_s).compile_s  # this run may have found its first code in a cache
        saves_s = self._watch.share_of(track) * step_s * (1 - 1 / ratio.value)
        return left is None or left * saves_s > cost_s

    def worth_another(self, plan: CompilePlan, track: Track) -> Decision:
        """Whether to try one more plan after the present one."""
        step_s = self._ledger.eager_step_s or median(track.pairs.eager)
        if track.phase is Phase.STEADY:
            step_s *= median(track.pairs.compiled) / median(track.pairs.eager)
        left, share = self._left(step_s), self._watch.share_of(track)
        return worth_one_more(
            plan=plan.name,
            remaining_steps=None if left is None else int(share * left),
            step_s=step_s,
            cost_s=self._cost_of_another(plan),
            spent_s=share * self._ledger.spent_s,
            gain=self._gain_of_another(plan),
        )

    def _gain_of_another(self, plan: CompilePlan) -> float:
        """What it is taken to gain over the present one; by the prior where it adds the optimizers to it."""
        if not plan.is_more_than(self._plan):
            return GAIN_OF_ONE_MORE
        if plan.adds_optimizers:
            return GAIN_OVER_KERNEL
        step_s = self._ledger.eager_step_s if self._on_cpu else None
        whole, part = (
            expected_speedup(p.regions, step_s, self._watch.op_statistics, fused=False)
            for p in (plan, self._plan)
        )
        return max(1.0, whole / part)

    def _cost_of_another(self, plan: CompilePlan) -> float:
        """Seconds of compiling it; what the present plan has compiled alike is only loaded."""
        ops = self._watch.op_statistics
        cost_s = self._memory.expectation(plan, None, None, ops).compile_s
        if not plan.is_more_than(self._plan) or self._config.backend != "inductor":
            return cost_s
        return cost_s - (1 - WARM_SHARE) * self._memory.expectation(self._plan, None, None, ops).compile_s

    @cached_property
    def _beside_a_child(self) -> Surroundings | None:
        """As things are when it is asked for first: it may be asked for before each step. None: no child."""
        return None if self._flip.ahead.why_none() else self._flip.ahead.surroundings()

    def _expectation(self, track: Track, known: Profile | None, step_s: float | None) -> Expectation:
        """What the plan costs and gains, compiled in the way that it would be."""
        found = self._assumed(known, step_s)
        if track.phase is not Phase.OBSERVING or self._flip.in_place:
            return found  # compiled in the step itself
        if self._memory.has_code_of(track.signature, self._plan.name):
            return found  # only loaded
        found, around = self._for_runs_to_come(track, found), self._beside_a_child
        if around is None:
            return found
        child_s = self._memory.child_s(self._plan, crowding(around), self._watch.op_statistics)
        child = Child(seconds=child_s, slowed=slowed_share(around))
        return replace(found, child=child)

    def forgone_s(self, track: Track, decision: Decision | None) -> float | None:
        """Seconds that compiled code would have saved in this run, if it was this forecast that declined.

        0 if the run has begun to compile, ``None`` if it would have saved nothing, or was not weighed.
        """
        step_s = self._ledger.eager_step_s
        if decision is None or decision.expected_cost_s is None or step_s is None:
            return None
        if decision.go and (track.state.flips or track.phase not in (Phase.OBSERVING, Phase.DECLINED)):
            return 0.0
        if track.phase is not Phase.DECLINED or not (decision.go or track.state.reason == decision.reason):
            return None  # where this rank would have compiled, another one has declined
        return forgone_s(step_s * track.steps, self._assumed(None, step_s)) or None

    def _assumed(self, known: Profile | None, step_s: float | None) -> Expectation:
        """By what was measured before, else by the operations of the step, and its time on a CPU."""
        seen_s = step_s if self._on_cpu else None
        found = self._memory.expectation(self._plan, known, seen_s, self._watch.op_statistics)
        is_measured = known is not None and known.compile_s is not None
        return found if is_measured else replace(found, start_s=self._start_s)

    @cached_property
    def _start_s(self) -> float:
        """Of a compiler in this process, as it is when this is asked for first: before a child process."""
        has_none = self._on_cpu or self._config.backend != "inductor"
        return 0.0 if has_none or graph_count() > 0 else START_ON_ACCELERATOR_S


def _usual_step_s(known: Profile | None, step_s: float | None) -> float | None:
    """Seconds of an eager step: those that the gain was measured with, if it was; else as seen in this run.

    A known plan is decided upon after the first step, which takes two to three times as long as later ones.
    """
    if step_s is None or known is None or known.speedup is None:
        return step_s
    return known.eager_s or step_s
