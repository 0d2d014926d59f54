"""Gathers the facts about one signature, and asks the forecast once it is hot."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from statistics import median

from lightning.pytorch import Trainer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.flip import Flip
from lightning_hotcompile.machine import Facts, Phase
from lightning_hotcompile.memory import Memory
from lightning_hotcompile.plan.forecast import (
    WARM_SHARE,
    Child,
    Decision,
    Expectation,
    forecast,
    forgone_s,
    worth_one_more,
)
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.stages import TRAIN, remaining_batches
from lightning_hotcompile.step_watch import StepWatch
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.swap.installation import OPTIMIZER
from lightning_hotcompile.swap.prewarm.choice import Surroundings, crowding, slowed_share, why_not
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.trainer_facts import device_type

SETTLING_LOOKS: tuple[int, ...] = (10, 20, 40)
"""After so many pairs of eager and compiled units the ratio is looked at."""

SETTLING_CONFIDENCE = 0.98
"""Of the interval at each look, so that all looks together are wrong in less than 5% of the runs.

Where there is no difference, one look at 95% is wrong in up to 5%, any of three in 7.9%; at 98% any of
three in 2.6%. That leaves room for steps whose times depend on those before them.
"""

_ATTEMPTS = 4
"""So many steps may not call what was compiled (a step that returns at once) before it is given up."""


class Judge:
    """Says what is known about a signature, in the words of the machine.

    Args:
        trainer: knows how many steps are left.
        config: the callback's options.
        flip: knows what is in place and what failed.
        watch: knows all signatures of this fit, and the step that was recorded.
        ledger: knows what a step takes.
        stage: ``train`` or another stage of the Trainer.
        memory: knows what earlier runs have learned.
        given: the decision to compile, where it was taken already.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: HotCompileConfig,
        flip: Flip,
        watch: StepWatch,
        ledger: Ledger,
        stage: str,
        memory: Memory,
        given: Decision | None = None,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._flip = flip
        self._watch = watch
        self._ledger = ledger
        self._stage = stage
        self._memory = memory
        self._given = given
        self.decision: Decision | None = given

    def facts(self, track: Track) -> Facts:
        """What the machine has to know about this signature now."""
        known = self._memory.of(track.signature)
        hot = track.hot or self._config.threshold == 0 or self._is_known(known, track)
        undecided = track.phase in (Phase.OBSERVING, Phase.REVERTED)
        hot = hot and not (undecided and self._flip.batch.is_one_to_wait_after())
        look, pairs = self._is_time_to_look(track), track.interleaved
        decision = self._decide(track) if hot and undecided else None
        ahead = decision is not None and decision.go and not decision.inline
        prewarm = self._prewarm(track) if ahead or track.phase is Phase.PREWARMING else "off"
        captures = self._config.threshold > 0 and not self._flip.in_place and self._flip.needs_capture
        if prewarm in ("wanted", "running") and self._trainer.world_size > 1:
            captures = False  # a warm-up of one rank alone would run collectives that no other rank comes to
        return Facts(
            hot=hot,
            decision=decision,
            prewarm=prewarm,
            needs_capture=captures,
            installed=self._flip.in_place,
            compiled_steps=track.compiled_steps,
            failure=self._failure(track) if track.phase.uses_compiled_code else None,
            retry=track.failure is not None,
            ratio=pairs.ratio(SETTLING_CONFIDENCE) if look and pairs is not None else None,
            settling_is_over=track.looks + 1 >= len(SETTLING_LOOKS) if look else track.settling_is_over,
            part=self._part(track),
            min_speedup=self._config.min_speedup,
            max_flips=self._config.max_flips,
        )

    def _is_known(self, known: Profile | None, track: Track) -> bool:
        """Whether an earlier run has decided: compile after the first step, which builds what is built once.

        Not if its code is gone: a whole compile is weighed when it is known what a step takes.
        """
        if known is None or known.verdict == "bad":
            return known is not None
        return known.verdict == "good" and track.steps > 0 and not self._memory.has_lost_code

    def _prewarm(self, track: Track) -> str:
        if track.phase not in (Phase.OBSERVING, Phase.PREWARMING) or self._flip.in_place:
            return "off"
        if self._trainer.local_rank > 0:
            return "off"  # one child on each machine: the other ranks load what it has compiled
        if (prewarm := self._flip.ahead.prewarm) is not None:
            return "over" if prewarm.is_over() else "running"
        scope = self._flip.installation.plan.scope
        known = self.why_no_prewarm() is not None or self._memory.has_code_of(track.signature, scope)
        return "off" if known else "wanted"

    def may_pay(self, track: Track) -> bool:
        """Whether compiling could pay if it gained very much: else no step is recorded, which takes time."""
        step_s, known = self._ledger.eager_step_s, self._memory.of(track.signature)
        if not self._config.cost_gate or step_s is None:
            return True
        left = remaining_batches(self._trainer, self._stage, step_s)
        plan = self._flip.installation.plan
        cheapest_s = WARM_SHARE * self._memory.expectation(plan, known, step_s).compile_s
        return left is None or left * step_s > cheapest_s

    @property
    def _on_cpu(self) -> bool:
        """Where the prior was measured: elsewhere a short step says nothing about the gain."""
        return device_type(self._trainer.lightning_module) == "cpu"

    def may_try_others(self, track: Track) -> bool:
        """Whether other plans than the first one are for this callback to try."""
        config = self._config
        chosen = config.scope == "auto" and config.cost_gate and config.min_speedup > 0
        alone = self._trainer.world_size == 1 and self._watch.tracks.flipped() == 1
        measured = self._stage == TRAIN and track.pairs.n > 0
        return chosen and alone and measured and track.state.flips < config.max_flips

    def worth_another(self, plan: CompilePlan, track: Track) -> Decision:
        """Whether to try one more plan after the present one."""
        step_s = self._ledger.eager_step_s or median(track.pairs.eager)  # of a batch; pairs are of units
        if track.phase is Phase.STEADY:
            step_s *= median(track.pairs.compiled) / median(track.pairs.eager)
        return worth_one_more(
            scope=plan.scope,
            remaining_steps=remaining_batches(self._trainer, self._stage, step_s),
            step_s=step_s,
            cost_s=self._memory.expectation(plan, None, None).compile_s,
            spent_s=self._ledger.spent_s,
        )

    def why_no_prewarm(self) -> str | None:
        """Why no child process fills the compiler's cache first, or ``None``."""
        if self._config.threshold == 0:
            return "threshold=0 compiles before the first step"
        return why_not(self._config.prewarm, self._config.backend, self._flip.ahead.surroundings())

    @cached_property
    def _beside_a_child(self) -> Surroundings | None:
        """As things are when it is asked for first: it may be asked for before each step. None: no child."""
        return None if self.why_no_prewarm() else self._flip.ahead.surroundings()

    def _expectation(self, track: Track, known: Profile | None, step_s: float | None) -> Expectation:
        """What the plan costs and gains, compiled in the way that it would be."""
        plan = self._flip.installation.plan
        found = self._assumed(plan, known, step_s)
        if track.phase is not Phase.OBSERVING or self._flip.in_place:
            return found  # compiled in the step itself
        if self._memory.has_code_of(track.signature, plan.scope):
            return found  # only loaded
        forgone, around = self._memory.forgone_s(track.signature), self._beside_a_child
        if around is None:
            return replace(found, forgone_s=forgone)
        child_s = self._memory.child_s(plan, crowding(around))
        child = Child(seconds=child_s, slowed=slowed_share(around))
        return replace(found, child=child, forgone_s=forgone)

    def forgone_s(self, track: Track) -> float | None:
        """Seconds that compiled code would have saved in this run, if it was the forecast that declined.

        0 if the run has begun to compile, ``None`` if compiling was not weighed.
        """
        decision, step_s = self.decision, self._ledger.eager_step_s
        if decision is None or decision.expected_cost_s is None or step_s is None:
            return None
        if decision.go:
            return 0.0
        if not (track.phase is Phase.DECLINED and track.state.reason == decision.reason):
            return None
        plan = self._flip.installation.plan
        return forgone_s(step_s * track.steps, self._assumed(plan, None, step_s))

    def _assumed(self, plan: CompilePlan, known: Profile | None, step_s: float | None) -> Expectation:
        """By what was measured before, else by the operations of the step, and its time on a CPU."""
        return self._memory.expectation(
            plan, known, step_s if self._on_cpu else None, self._watch.op_statistics
        )

    def _is_time_to_look(self, track: Track) -> bool:
        """Few looks, at fixed numbers of pairs: who looks at each step finds a difference by chance."""
        left, pairs = SETTLING_LOOKS[track.looks :], track.interleaved
        return pairs is not None and bool(left) and pairs.n >= left[0]

    def _part(self, track: Track) -> str | None:
        """The part of the plan to try with and without: the optimizer.

        Not the rest: a compiled optimizer is made for the gradients of the compiled step, whose layout eager
        ones may not have. None if the plan was asked for as it is, if an earlier run has tried, or where
        ranks would have to agree.
        """
        parts, config = self._flip.installation.parts, self._config
        if track.phase is not Phase.SETTLING or OPTIMIZER not in parts or len(parts) < 2:
            return None
        if config.compile_optimizer != "auto" or config.min_speedup == 0 or self._trainer.world_size > 1:
            return None
        known, scope = self._memory.of(track.signature), self._flip.installation.plan.scope
        tried = known is not None and known.verdict == "good" and known.scope == scope
        return None if tried else OPTIMIZER

    def _failure(self, track: Track) -> str | None:
        failure = self._flip.failure() or track.failure
        if failure is not None and failure is track.failure and self._flip.recompile_reason is not None:
            failure += f"; it was compiled again because of {self._flip.recompile_reason}"
        if failure is None and track.attempts >= _ATTEMPTS and not track.compiled_steps:
            return self._flip.why_nothing_ran()
        return failure

    def _decide(self, track: Track) -> Decision:
        flipped, limit = self._watch.tracks.flipped(), self._config.max_signatures
        if flipped >= limit and not track.state.flips:
            return Decision(go=False, reason=f"max_signatures={limit} is reached")
        if self._watch.differentiates_twice:
            return Decision(go=False, reason="create_graph=True: compiled code has no second derivative")
        decision = (self._given if track.state.flips else None) or self._forecast(track)
        if self.decision is None or self.decision.wait:
            self.decision = decision
        return decision

    def _forecast(self, track: Track) -> Decision:
        if not self._config.cost_gate:
            return Decision(go=True, reason="cost_gate=False: compiled without a forecast")
        step_s = self._ledger.eager_step_s
        known = self._memory.of(track.signature)
        if known is not None and known.verdict == "bad":
            return Decision(go=False, reason=f"an earlier run ({known.when[:10]}) found: {known.reason}")
        return forecast(
            remaining_steps=remaining_batches(self._trainer, self._stage, step_s),
            step_s=step_s,
            expected=self._expectation(track, known, step_s),
            spent_s=self._ledger.spent_s,
            or_inline=self._config.prewarm is not True,
        )
