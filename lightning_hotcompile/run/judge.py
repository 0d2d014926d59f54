"""Gathers the facts about one signature, and asks what its plan would cost and save once it is hot."""

from __future__ import annotations

from lightning_hotcompile.machine import Facts, Phase
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.run.stages import TRAIN, ends_unit
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.swap.inductor.cxx import why_no_compiler
from lightning_hotcompile.swap.inductor.paths import why_no_folder
from lightning_hotcompile.swap.inductor.triton import why_no_kernels
from lightning_hotcompile.swap.installation import OPTIMIZER
from lightning_hotcompile.swap.onlookers import HOOKS_ON_ALL_MODULES, has_hooks_on_all_modules
from lightning_hotcompile.swap.prewarm.threads import FewerThreads
from lightning_hotcompile.swap.tracing.stance import stance_against_compiling, why_off
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.structure import untraceable_in
from lightning_hotcompile.watch.unit import UnitSignature

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
    """Says what is known about a signature, as the :class:`Facts` that the state machine decides by.

    Args:
        context: of the stage.
        flip: knows what is in place and what failed.
        weighing: says whether the plan pays.
        given: the decision to compile, where it was taken already.
    """

    def __init__(
        self, context: StageContext, flip: Flip, weighing: Weighing, given: Decision | None = None
    ) -> None:
        self._trainer = context.trainer
        self._config = context.config
        self._stage = context.stage
        self._watch = context.watch
        self._memory = context.memory
        self._side = context.side
        self._flip = flip
        self._weighing = weighing
        self._given = given
        self.decision: Decision | None = given

    def facts(self, track: Track) -> Facts:
        """What the machine has to know about this signature now."""
        known = self._weighing.known(track)
        hot = track.hot or self._config.threshold == 0 or self._is_known(known, track)
        undecided = track.phase in (Phase.OBSERVING, Phase.REVERTED)
        hot = hot and not (undecided and self._has_to_wait())
        look, pairs = self._is_time_to_look(track), track.interleaved
        hopeless = None if hot else self._too_short(track)
        decision = self._decide(track) if hot and undecided else hopeless
        ahead = decision is not None and decision.go and not decision.inline
        prewarm = self._prewarm(track) if ahead or track.phase is Phase.PREWARMING else "off"
        if track.phase is Phase.PREWARMING:
            decision = self._second_thought(track, prewarm)
        return Facts(
            hot=hot or hopeless is not None,
            decision=decision,
            tries_besides=self._side.is_deciding,
            prewarm=prewarm,
            compiled_steps=track.compiled_steps,
            failure=self.failure(track) if track.phase.uses_compiled_code else None,
            retry=track.failure is not None,
            ratio=pairs.ratio(SETTLING_CONFIDENCE) if look and pairs is not None else None,
            settling_is_over=track.settling_is_over or (look and track.looks + 1 >= len(SETTLING_LOOKS)),
            part=self._part(track),
            min_speedup=self._config.min_speedup,
            max_flips=self._config.max_flips,
        )

    def _second_thought(self, track: Track, prewarm: str) -> Decision | None:
        """The decision against a child process that crashed, or that takes more than was expected."""
        if prewarm == "over" and (crash := self._flip.ahead.why_crashed()) is not None:
            return Decision(go=False, reason=crash)
        if self._trainer.world_size > 1:  # one rank does not end what all wait for
            return None
        if prewarm == "over":
            return self._weighing.too_late(track)
        return self._weighing.too_dear(track) if prewarm == "running" else None

    def _has_to_wait(self) -> bool:
        """For threads that are lent to a child: code is made for a number; or for a batch that tells more."""
        return FewerThreads.are_lent() or self._flip.batch.is_one_to_wait_after()

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
        plan = self._flip.installation.plan
        known = self._flip.ahead.why_none() or self._memory.has_code_of(track.signature, plan.name)
        if known:
            return "off"
        return "later" if self._waits_for_update(track) else "wanted"

    def _waits_for_update(self, track: Track) -> bool:
        """Whether a later step like this one shows a child process what it takes to compile the optimizers.

        With gradient accumulation, where such steps end a cycle. Ranks agree on a child before they wait.
        """
        unit, is_to_agree = track.unit, track.phase is Phase.OBSERVING and self._trainer.world_size > 1
        ends_cycles = isinstance(unit, UnitSignature) and unit.steps[-1][0] == track.signature
        if is_to_agree or not ends_cycles or not self._flip.installation.optimizers:
            return False
        return not ends_unit(self._trainer, self._stage)

    def may_try_others(self, track: Track) -> bool:
        """Whether other plans than the first one are for this callback to try: at least all of that one."""
        config, plan = self._config, self._flip.installation.plan
        free = config.scope in ("auto", "step") or plan.spares_optimizers
        chosen = free and config.cost_gate and config.min_speedup > 0
        alone = self._trainer.world_size == 1 and self._watch.tracks.flipped() == 1
        measured = self._stage == TRAIN and track.pairs.n > 0
        return chosen and alone and measured and track.state.flips < config.max_flips

    def _is_time_to_look(self, track: Track) -> bool:
        """Few looks, at fixed numbers of pairs: who looks at each step finds a difference by chance.

        The last one, where many units are no measure, at whatever pairs there are.
        """
        left, pairs = SETTLING_LOOKS[track.looks :], track.interleaved
        enough = pairs is not None and bool(left) and pairs.n >= left[0]
        return enough or track.settling_is_over

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
        known, plan = self._memory.of(track.signature), self._flip.installation.plan
        tried = known is not None and known.verdict == "good" and known.scope == plan.name
        return None if tried else OPTIMIZER

    def failure(self, track: Track) -> str | None:
        """Why compiled code cannot be used any longer, ``None`` if it can."""
        failure = self._flip.failure() or track.failure
        if failure is not None and failure is track.failure and has_hooks_on_all_modules():
            return HOOKS_ON_ALL_MODULES
        if failure is not None and failure is track.failure and self._flip.recompile_reason is not None:
            failure += f"; it was compiled again because of {self._flip.recompile_reason}"
        if failure is None and track.attempts >= _ATTEMPTS and not track.compiled_steps:
            return self._flip.why_nothing_ran()
        return failure

    def _too_short(self, track: Track) -> Decision | None:
        """Against compiling before it is hot: a short run pays for one look only. Ranks have to agree."""
        if not track.is_known_soon or self._trainer.world_size > 1:
            return None
        found = self._weighing.too_short()
        track.is_hopeless = found is not None
        self._keep(found)
        return found

    def _decide(self, track: Track) -> Decision:
        if (reason := self._why_never(track)) is not None:
            return Decision(go=False, reason=reason)
        given = self._given if track.state.flips else None
        decision = _waits() or given or self._weighing.forecast(track)
        self._keep(decision)
        return decision

    def _why_never(self, track: Track) -> str | None:
        """Why nothing is compiled for this signature, whatever it would gain."""
        flipped, limit = self._watch.tracks.flipped(), self._config.max_signatures
        if flipped >= limit and not track.state.flips:
            return f"max_signatures={limit} is reached"
        if (switch := why_off()) is not None:
            return f"torch.compile is switched off by {switch}"
        if (without := self._why_no_inductor()) is not None:
            return without
        if (failure := self._flip.why_useless()) is not None:
            return failure
        if (crash := self._flip.ahead.why_crashed()) is not None:  # there is one child for all kinds of steps
            return crash
        if self._watch.differentiates_twice:
            return "create_graph=True, or torch.func: compiled code has no second derivative"
        return _why_not_batch(track) if self._config.scope in ("auto", "step") else None

    def _why_no_inductor(self) -> str | None:
        if self._config.backend != "inductor":
            return None
        device = self._trainer.lightning_module.device
        return why_no_folder() or why_no_compiler(device) or why_no_kernels(device)

    def _keep(self, decision: Decision | None) -> None:
        """The first one that was taken; those on signatures that come later are theirs alone."""
        if decision is not None and (self.decision is None or self.decision.wait or self._side.is_deciding):
            self.decision = decision


def _waits() -> Decision | None:
    """For what somebody has put in place that keeps compiled code out, and may take away again."""
    if has_hooks_on_all_modules():
        return Decision(go=False, wait=True, reason=f"waits: {HOOKS_ON_ALL_MODULES}")
    stance = stance_against_compiling()
    if stance is None:
        return None
    return Decision(
        go=False, wait=True, reason=f"waits until torch.compiler's stance is no longer {stance!r}"
    )


def _why_not_batch(track: Track) -> str | None:
    """Why no code can be compiled that takes such a batch, or ``None``."""
    found = next(untraceable_in(track.signature.batch), None)
    if found is None:
        return None
    place, name = found
    return (
        f"{place} is of type {name}: compiled code takes no such subclass of Tensor. "
        "on_after_batch_transfer can make plain ones, by as_subclass(torch.Tensor)"
    )
