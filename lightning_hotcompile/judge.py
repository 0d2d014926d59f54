"""Gathers the facts about one signature, and asks the forecast once it is hot."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_hotcompile import trainer_facts
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.flip import Flip
from lightning_hotcompile.machine import Facts, Phase
from lightning_hotcompile.plan.forecast import Decision, expected_compile_s, expected_speedup, forecast
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.tracks import Track, TrackBook

SETTLING_LOOKS = (10, 20, 40)
"""After so many pairs of eager and compiled units the ratio is looked at."""


class Judge:
    """Says what is known about a signature, in the words of the machine.

    Args:
        trainer: knows how many steps are left.
        config: the callback's options.
        flip: knows what is in place and what failed.
        tracks: all signatures of this fit.
        ledger: knows what a step takes.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: HotCompileConfig,
        flip: Flip,
        tracks: TrackBook,
        ledger: Ledger,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._flip = flip
        self._tracks = tracks
        self._ledger = ledger
        self.decision: Decision | None = None

    def facts(self, track: Track) -> Facts:
        """What the machine has to know about this signature now."""
        hot = track.hot or self._config.threshold == 0
        undecided = track.phase in (Phase.OBSERVING, Phase.REVERTED)
        look = self._is_time_to_look(track)
        return Facts(
            hot=hot,
            decision=self._decide(track) if hot and undecided else None,
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

    def _is_time_to_look(self, track: Track) -> bool:
        """Few looks, at fixed numbers of pairs: who looks at each step finds a difference by chance."""
        left = SETTLING_LOOKS[track.looks :]
        return track.phase is Phase.SETTLING and bool(left) and track.pairs.n >= left[0]

    def _failure(self, track: Track) -> str | None:
        failure = self._flip.failure() or track.failure
        if failure is None and track.attempts and not track.compiled_steps:
            return self._flip.why_nothing_ran()
        return failure

    def _decide(self, track: Track) -> Decision:
        flipped, limit = self._tracks.flipped(), self._config.max_signatures
        if flipped >= limit and not track.state.flips:
            return Decision(go=False, reason=f"max_signatures={limit} is reached")
        decision = self._forecast()
        self.decision = self.decision or decision
        return decision

    def _forecast(self) -> Decision:
        if not self._config.cost_gate:
            return Decision(go=True, reason="cost_gate=False: compiled without a forecast")
        step_s, plan = self._ledger.eager_step_s, self._flip.installation.plan
        kinds = tuple(region.kind for region in plan.regions)
        return forecast(
            remaining_steps=trainer_facts.remaining_batches(self._trainer, step_s),
            step_s=step_s,
            compile_s=expected_compile_s(kinds),
            speedup=expected_speedup(kinds),
        )
