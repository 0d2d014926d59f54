"""Whether the calls of a region find compiled code that fits them."""

from __future__ import annotations

from lightning_hotcompile.swap.dynamo import recent_recompile_reasons
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.witness import Witness

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
        self._before = (0, 0)
        self._misses = 0

    def begin(self) -> None:
        """A call begins."""
        self._before = (self._witness.total_runs, len(self._witness.graphs))

    def end(self, lane: Lane) -> str | None:
        """The call ended; why nothing more can be compiled for this region, if that is so."""
        runs, graphs = self._before
        if self._witness.total_runs > runs:
            self._misses = 0
        elif lane is Lane.REUSE:
            self._misses += 1
        elif len(self._witness.graphs) == graphs:
            return self._refused()
        return None

    def _refused(self) -> str | None:
        graphs = len(self._witness.graphs_of(self._region))
        if graphs < MANY_GRAPHS:
            return None
        last = "".join(f"; the last reason: {reason}" for reason in recent_recompile_reasons()[-1:])
        return f"none of its {graphs} graphs fits, and Dynamo compiles no more (recompile limit){last}"

    @property
    def is_lost(self) -> bool:
        """Whether compiled code exists and fits no more."""
        return self._misses >= MISSES_IN_A_ROW and self._witness.runs_of(self._region) > 0
