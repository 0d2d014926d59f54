"""Two plans that are about as fast take turns, unit by unit, until it is known which one is faster."""

from __future__ import annotations

from dataclasses import replace

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.run.judge import SETTLING_CONFIDENCE
from lightning_hotcompile.run.round import Result, Round
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.stats import Ratio

LOOKS = (40, 80, 160, 320)
"""After so many pairs of units it is looked who is ahead. More than eager steps are given: both are fast."""

SAME = 1.005
"""What differs by less is not worth another look."""

_MISSES = 3
"""Turns in a row after which a plan whose code did not run is out."""

_MAX_UNITS = 3 * LOOKS[-1]
"""Units that may take turns, whatever could be learned from them."""


class Race:
    """The best plan until now, and another one: by their ratios to eager neither is known to be the faster.

    Args:
        kept: the best one.
        tried: the other one, which is in place.
        track: the signature on which both were measured.
    """

    def __init__(self, kept: Result, tried: Result, track: Track) -> None:
        self.kept = kept
        self.tried = tried
        self._track = track
        self._misses = {kept.name: 0, tried.name: 0}
        """Turns in a row in which a plan's compiled code did not run."""

        reason = f"scope {tried.name} {tried.ratio}, scope {kept.name} {kept.ratio}: now they take turns"
        track.state = replace(
            tried.state, phase=Phase.REFINING, reason=reason, trying=f"scope {tried.name}", outcome=None
        )
        track.began_comparing()

    def next(self) -> Round:
        """The one whose turn it is; of the two kinds of units those without the other plan are first."""
        return (self.tried if self._track.without is None else self.kept).round

    def other(self, one: Result) -> Result:
        """Who is not that one."""
        return self.tried if one is self.kept else self.kept

    def had_turn(self, one: Result, *, ran: bool) -> None:
        """A step has ended that was one plan's; whether its compiled code ran."""
        self._misses[one.name] = 0 if ran else self._misses[one.name] + 1

    @property
    def is_void(self) -> bool:
        """Whether neither plan's code runs any longer."""
        return min(self._misses.values()) > 0 and max(self._misses.values()) >= _MISSES

    def misfit(self, one: Result) -> str | None:
        """That a plan's code does not run any longer, while the other one's does."""
        misses = self._misses[one.name]
        return f"its compiled code did not run in {misses} turns in a row" if misses >= _MISSES else None

    @property
    def gain(self) -> float:
        """Seconds that eager takes longer, per second of compiled steps: the mean of both."""
        return (self.kept.speedup + self.tried.speedup) / 2 - 1

    @property
    def ratio(self) -> Ratio | None:
        """Time of the plan that was the best one / time of the other."""
        return self._track.trial.ratio(SETTLING_CONFIDENCE)

    def winner(self) -> Result | None:
        """Who is faster, as soon as that is known, or does not matter; ``None`` before."""
        track, pairs = self._track, self._track.trial.n
        over = track.settling_units >= _MAX_UNITS or pairs >= LOOKS[-1]
        if not over and pairs < LOOKS[track.looks]:
            return None
        track.looks += 1
        ratio = self.ratio
        if ratio is None:
            return self.kept if over else None
        if ratio.high < SAME:
            return self.kept
        if ratio.low > 1:
            return self.tried
        return (self.tried if ratio.value > SAME else self.kept) if over else None

    def ratio_of(self, winner: Result) -> Ratio | None:
        """Time of the other one / time of the winner."""
        ratio = self.ratio
        if ratio is None or winner is self.tried:
            return ratio
        return replace(ratio, value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)

    def in_words(self, winner: Result) -> str:
        """How it went."""
        ratio, loser = self.ratio_of(winner), self.other(winner)
        if ratio is None:
            return f"taking turns with scope {loser.name}, too few steps could be compared"
        if ratio.value < SAME:
            return f"taking turns, scope {loser.name} was about as fast"
        return f"taking turns, scope {winner.name} was {ratio.value:.3f}x as fast as scope {loser.name}"
