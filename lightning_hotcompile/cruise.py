"""The short ways of steps whose signature is at rest: nothing can change, so little or nothing is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.tracks import Track

CRUISE = 31
"""So many steps may go the short way, one after the other; then all is asked anew."""


class Cruise:
    """Steps like the one before, as long as their batches are alike.

    The model's flags are not looked at: compiled code has guards on them, and to eager code they are
    nothing.

    Args:
        track: where the step before belongs; it is at rest.
        lane: which way that step went.
        dataloader_idx: where its batch came from.
        is_like: whether a batch is as in the track's signature.
    """

    def __init__(
        self,
        track: Track,
        lane: Lane,
        dataloader_idx: int,
        is_like: Callable[[Any], bool],
    ) -> None:
        self.track = track
        self.lane = lane
        self._dataloader_idx = dataloader_idx
        self._is_like = is_like
        self._left = CRUISE
        self.under_way = False
        """Whether the step that runs goes this way."""

    def goes_on(self, batch: Any, batch_idx: int, dataloader_idx: int) -> bool:
        """Whether the step of this batch may go the same way; never the first one of an epoch."""
        another = batch_idx == 0 or dataloader_idx != self._dataloader_idx
        if another or not self._left or self.track.failure is not None:
            return False
        self._left -= 1
        return self._is_like(batch)


CALM = 4
"""After so many long looks at steps that stay eager, one after the other, naps begin."""

NAP = 30
"""Steps of a nap. With the look after it an odd number, so that batches in turns are all met."""


class Nap:
    """Steps that stay eager for good and are not even timed.

    Args:
        track: where they belong, as far as it is known.
        since: when the nap began, in seconds.
    """

    def __init__(self, track: Track, since: float) -> None:
        self.track = track
        self.since = since
        self.steps = 0
        """That have ended since it was booked last."""

        self._left = NAP

    def goes_on(self, batch_idx: int) -> bool:
        """Whether the step that begins is slept through; never the first one of an epoch."""
        if not self._left or batch_idx == 0:
            return False
        self._left -= 1
        return True
