"""Steps at rest are slept through: nothing can change, so one in many is looked at."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.tracks import Track

CALM = 32
"""After so many looks at steps at rest naps begin: whatever comes once in as many steps was met before."""

CALM_EAGER = 16
"""The same where nothing is compiled, so that no step can run wrongly; the price of a look is seen there."""

LOOKS_AFTER_ANOTHER = 8
"""Looks before the next nap, once a step was of another kind or has not fitted the compiled code."""

NAP = 62
"""Steps of a nap. With the look after it an odd number, so that batches in turns are all met."""


def looks_before(lane: Lane, *, nothing_pays: bool = False) -> int:
    """Looks at steps at rest before a nap; one where no kind of step can pay, so that none is looked for."""
    if nothing_pays:
        return 1
    return CALM_EAGER if lane is Lane.EAGER else CALM


class Calm:
    """Counts looks at steps at rest that all went one way: after some a nap may begin."""

    def __init__(self) -> None:
        self.lane = Lane.EAGER
        """That of the step that was looked at last."""

        self._looks = 0

    def look(self, lane: Lane, *, at_rest: bool) -> None:
        """A step is looked at that goes this way."""
        as_before, self.lane = lane is self.lane, lane
        if lane is not Lane.COMPILE and as_before and at_rest:
            self._looks += 1
        else:
            self.stay_awake()

    def stay_awake(self) -> None:
        """A step that was another one, or fitted nothing, may be the first of many."""
        if self._looks:
            self._looks = min(self._looks, looks_before(self.lane) - LOOKS_AFTER_ANOTHER)

    def begin_anew(self) -> None:
        """No look until now counts."""
        self._looks = 0

    def is_enough(self, *, nothing_pays: Callable[[], bool]) -> bool:
        """Whether a nap may begin; soon where no kind of step can pay."""
        return self._looks > 0 and self._looks >= looks_before(self.lane, nothing_pays=nothing_pays())


class Nap:
    """Steps that go as the one before, and are neither read nor timed.

    Compiled code has guards on all that it was made for, the batch included: what does not fit runs eagerly,
    nothing is compiled, and the nap is over.

    Args:
        track: where the steps belong, as far as it is known.
        lane: which way they go.
        flip: what is in place.
        now: a clock in seconds.
    """

    def __init__(self, track: Track, lane: Lane, flip: Flip, now: Callable[[], float]) -> None:
        self.track = track
        self.compiled = lane is not Lane.EAGER
        self.steps = 0
        """That have ended since they were booked last."""

        self.missed = False
        """Whether one of them has not fitted."""

        self._now = now
        self._is_in_step = False
        self._at = now()  # what came before is in one of these two
        self._in_steps_s = self._between_s = 0.0
        self._lane = lane
        self._gate = flip.installation.gate
        self._watch = flip.installation.witness.watch
        self._failures, self._graphs = self._gate.failures, flip.installation.witness.graphs
        self._happened = len(self._failures) + len(self._graphs)
        self._runs = self._watch.total_runs
        self._left = NAP

    def goes_on(self, batch_idx: int) -> bool:
        """Whether the step that begins is slept through; never the first one of an epoch."""
        if not self._left or batch_idx == 0:
            return False
        self._left -= 1
        self._between_s += self._seconds()
        self._is_in_step = True
        self._gate.lane = self._lane  # as after Gate.open: nothing is compiled, and nothing left out
        return True

    def went_on(self) -> None:
        """Such a step ended."""
        self.steps += 1
        if self.compiled:
            self._gate.lane = Lane.EAGER
            runs = self._watch.total_runs
            if runs == self._runs:
                self.missed = True
                self._left = 0
            if len(self._failures) + len(self._graphs) != self._happened:
                self._left = 0
            self._runs = runs
        self._in_steps_s += self._seconds()
        self._is_in_step = False

    def _seconds(self) -> float:
        """Since this was asked last."""
        before, self._at = self._at, self._now()
        return self._at - before

    def book(self, ledger: Ledger) -> int:
        """Enter the steps that have ended since this was done last; one may be under way. Says how many."""
        steps, self.steps = self.steps, 0
        self._between_s += 0.0 if self._is_in_step else self._seconds()
        if steps:
            phase = self.track.phase.value
            ledger.skip(steps, self._in_steps_s, self._between_s, phase, compiled=self.compiled)
            self.track.slept(steps, compiled=self.compiled, missed=self.missed)
            self._in_steps_s = self._between_s = 0.0
        return steps

    def end(self) -> None:
        """Be it in mid-step."""
        self._gate.close()
