"""Gathers the facts about one signature, and asks the forecast once it is hot."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.flip import Flip
from lightning_hotcompile.machine import Facts, Phase
from lightning_hotcompile.memory import Memory
from lightning_hotcompile.plan.forecast import Decision, forecast
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.stages import remaining_batches
from lightning_hotcompile.step_watch import StepWatch
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.swap.prewarm.choice import Surroundings, why_not
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.trainer_facts import device_type

SETTLING_LOOKS: tuple[int, ...] = (10, 20, 40)
"""After so many pairs of eager and compiled units the ratio is looked at."""

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
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._flip = flip
        self._watch = watch
        self._ledger = ledger
        self._stage = stage
        self._memory = memory
        self.decision: Decision | None = None

    def facts(self, track: Track) -> Facts:
        """What the machine has to know about this signature now."""
        known = self._memory.of(track.signature)
        hot = track.hot or self._config.threshold == 0 or _is_known(known, track)
        undecided = track.phase in (Phase.OBSERVING, Phase.REVERTED)
        hot = hot and not (undecided and self._flip.batch.is_one_to_wait_after())
        look = self._is_time_to_look(track)
        return Facts(
            hot=hot,
            decision=self._decide(track) if hot and undecided else None,
            prewarm=self._prewarm(track) if hot or track.phase is Phase.PREWARMING else "off",
            needs_capture=self._config.threshold > 0 and not self._flip.in_place and self._flip.needs_capture,
            installed=self._flip.in_place,
            compiled_steps=track.compiled_steps,
            failure=self._failure(track) if track.phase.uses_compiled_code else None,
            retry=track.failure is not None,
            ratio=track.pairs.ratio() if look else None,
            settling_is_over=track.looks + 1 >= len(SETTLING_LOOKS) if look else track.settling_is_over,
            min_speedup=self._config.min_speedup,
            max_flips=self._config.max_flips,
        )

    def _prewarm(self, track: Track) -> str:
        if track.phase not in (Phase.OBSERVING, Phase.PREWARMING) or self._flip.in_place:
            return "off"
        if self._flip.prewarm is not None:
            return "over" if self._flip.prewarm.is_over() else "running"
        return "off" if self.why_no_prewarm() else "wanted"

    def why_no_prewarm(self) -> str | None:
        """Why no child process fills the compiler's cache first, or ``None``."""
        if self._config.threshold == 0:
            return "threshold=0 compiles before the first step"
        if self._trainer.world_size > 1:
            return "several ranks compile together"
        around = Surroundings.here(accelerator=device_type(self._trainer.lightning_module) != "cpu")
        return why_not(self._config.prewarm, self._config.backend, around)

    def _is_time_to_look(self, track: Track) -> bool:
        """Few looks, at fixed numbers of pairs: who looks at each step finds a difference by chance."""
        left = SETTLING_LOOKS[track.looks :]
        return track.phase is Phase.SETTLING and bool(left) and track.pairs.n >= left[0]

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
        decision = self._forecast(track)
        if self.decision is None or self.decision.wait:
            self.decision = decision
        return decision

    def _forecast(self, track: Track) -> Decision:
        if not self._config.cost_gate:
            return Decision(go=True, reason="cost_gate=False: compiled without a forecast")
        step_s, plan = self._ledger.eager_step_s, self._flip.installation.plan
        known = self._memory.of(track.signature)
        if known is not None and known.verdict == "bad":
            return Decision(go=False, reason=f"an earlier run ({known.when[:10]}) found: {known.reason}")
        return forecast(
            remaining_steps=remaining_batches(self._trainer, self._stage, step_s),
            step_s=step_s,
            expected=self._memory.expectation(tuple(region.kind for region in plan.regions), known),
            spent_s=self._ledger.spent_s,
        )


def _is_known(known: Profile | None, track: Track) -> bool:
    """Whether an earlier run has decided: compile after the first step, which builds what is built once."""
    if known is None:
        return False
    return known.verdict == "bad" or (known.verdict == "good" and track.steps > 0)
