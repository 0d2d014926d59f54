"""Whether the calls of a region find compiled code that fits them."""

from __future__ import annotations

from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.past_compiles import latest_reason

MISSES_IN_A_ROW = 3
"""Calls that no compiled code fitted, one after the other, after which a region counts as eager."""

MANY_GRAPHS = 8
"""Dynamo's own recompile limit: from so many graphs on it may refuse more, and runs the code eagerly."""


class Fit:
    """Watches the calls of one region: a call that no compiled code fits runs eagerly, without a word.

    Args:
        region: its name.
        witness: knows what ran and what was compiled.
    """

    def __init__(self, region: str, witness: Witness) -> None:
        self._region = region
        self._witness = witness
        self.misses = 0
        """Calls in a row that no compiled code fitted."""
        self.is_lost = False
        """Whether compiled code exists and fits no more."""

    def ran(self) -> None:
        """Compiled code ran in a call."""
        self.misses = 0
        self.is_lost = False

    def missed(self) -> None:
        """A call that could use what is compiled ran eagerly."""
        self.misses += 1
        if self.misses >= MISSES_IN_A_ROW:
            self.is_lost = self._witness.runs_of(self._region) > 0

    def refused(self) -> str | None:
        """A call that could compile did not; why nothing more can be compiled here, if that is so."""
        graphs = len(self._witness.graphs_of(self._region))
        if graphs < MANY_GRAPHS:
            return None
        reason = latest_reason()
        last = f"; the last reason: {reason}" if reason else ""
        return f"none of its {graphs} graphs fits, and Dynamo compiles no more (recompile limit){last}"
