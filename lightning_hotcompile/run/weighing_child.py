"""Asks the forecast about one plan, and once more while a child process compiles it, or has compiled it."""

from __future__ import annotations

from dataclasses import replace

from lightning_hotcompile.plan.forecast import WARM_SHARE, Child, Decision, forecast
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.tracks import Track

_ASKED_EVERY = 16
"""Steps beside the child from one question to the next: nothing changes fast."""

_OVERDUE = 0.5
"""A child that is over the time that was expected is taken to need half as much again as it has taken."""


class WeighingChild(Weighing):
    """All of the weighing; here what is asked of a plan with a child: what that has cost already is spent."""

    _looks = 0

    def too_dear(self, track: Track) -> Decision | None:
        """The decision against a child process that is at work; ``None`` where it still pays, or may.

        How far training falls behind meanwhile is assumed before it begins, and seen then: the child has a
        core of its own, but not the memory and the caches.
        """
        step_s, prewarm = self._ledger.eager_step_s, self._flip.ahead.prewarm
        beside_s, self._looks = self._ledger.beside_child_s, self._looks + 1
        if not self._config.cost_gate or step_s is None or beside_s is None or self._looks % _ASKED_EVERY:
            return None
        left = self._left(step_s)
        if left is None or prewarm is None or not prewarm.is_slowing:
            return None
        crowding, elapsed_s = self._flip.ahead.crowding, prewarm.elapsed_s
        whole_s = self._memory.child_s(self._plan, crowding, self._watch.op_statistics)
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
