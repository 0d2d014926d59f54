"""Turns what happens into events, and tells them on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lightning_hotcompile.receipt.event_kinds import (
    Compiled,
    Compiling,
    Declined,
    Detected,
    Event,
    Fallback,
    FreedMemoryKept,
    FusedTried,
    ParityChecked,
    PartTried,
    PhaseChanged,
    Planned,
    Recompiled,
    Reverted,
    ScopesRaced,
    SpeedUp,
)
from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.swap.graphs.graph import Graph
from lightning_hotcompile.watch.canonical import OpGraph
from lightning_hotcompile.watch.stats import Ratio

_SEQUENCE_LIMIT = 12

_NOT_MEASURED = {"value": math.nan, "low": math.nan, "high": math.nan, "n": 0, "confidence": None}
"""The fields of a :class:`~lightning_hotcompile.watch.stats.Ratio` where there is none."""


class Story:
    """Tells events to whoever listens; keeps count of what a receipt needs.

    Args:
        emit: receives each event.
        step: tells how many batches were seen.
    """

    def __init__(self, emit: Callable[[Event], None], step: Callable[[], int]) -> None:
        self._emit = emit
        self._step = step
        self.recompiles = 0

    def detected(self, signature: str, count: int, op_graph: OpGraph | None, family: str = "") -> None:
        """A step signature became hot."""
        self._emit(
            Detected(
                step=self._step(),
                signature=signature,
                count=count,
                op_sequence=op_graph.sequence_text(_SEQUENCE_LIMIT) if op_graph else "",
                n_ops=op_graph.n_ops if op_graph else None,
                family=family,
            )
        )

    def kept_freed_memory(self, faults: int | None) -> None:
        """Each step has taken memory from the system anew, and does so no longer."""
        self._emit(FreedMemoryKept(step=self._step(), faults=faults or 0))

    def tried_fused(self, found: FusedOptimizer) -> None:
        """An optimizer has torch's fused kernel from now on, or for good not."""
        measured: dict[str, Any] = _NOT_MEASURED if found.speedup is None else vars(found.speedup)
        self._emit(
            FusedTried(
                step=self._step(),
                optimizer=f"{found.name} ({found.class_name})",
                kept=found.kept,
                reason=found.reason,
                timed_before=found.timed_before,
                **measured,
            )
        )

    def planned(self, scope: str, reason: str, regions: int, tree: str) -> None:
        """The plan that is about to be carried out."""
        self._emit(Planned(step=self._step(), scope=scope, reason=reason, regions=regions, tree=tree))

    def entered(self, phase: str, reason: str) -> None:
        """A signature changed its phase."""
        step = self._step()
        self._emit(PhaseChanged(step=step, phase=phase, reason=reason))
        if phase == "declined":
            self._emit(Declined(step=step, reason=reason))
        elif phase == "reverted":
            self._emit(Reverted(step=step, reason=reason))

    def measured(self, ratio: Ratio) -> None:
        """The interleaved steps were compared."""
        self._emit(SpeedUp(step=self._step(), verdict=ratio.verdict, **vars(ratio)))

    def tried(self, part: str, ratio: Ratio, *, kept: bool) -> None:
        """Steps without one part of the plan were compared with steps of the whole plan."""
        self._emit(PartTried(step=self._step(), part=part, kept=kept, **vars(ratio)))

    def raced(self, kept: str, left: str, ratio: Ratio) -> None:
        """Two scopes took turns, and one of them is kept; above 1 it is the faster one."""
        self._emit(ScopesRaced(step=self._step(), kept=kept, left=left, **vars(ratio)))

    def compiling(self, regions: int) -> None:
        """Compiling begins."""
        self._emit(Compiling(step=self._step(), regions=regions))

    def compiled(
        self, graphs: Sequence[Graph], known: Collection[str], reasons: Mapping[str | None, str]
    ) -> None:
        """Graphs went through the backend.

        Args:
            graphs: what was captured.
            known: regions that had graphs before; another one of these is a recompile.
            reasons: of compiles, by their numbers.
        """
        for graph in graphs:
            if graph.error is not None and graph.parity is None:
                continue  # told as a fallback when the region is taken out
            self._emit(
                Compiled(
                    step=self._step(),
                    region=graph.region,
                    seconds=graph.seconds,
                    n_ops=graph.n_ops,
                    cache_hit=graph.cache_hit,
                )
            )
            self._compared(graph)
        for graph in graphs:
            if graph.region in known:
                self.recompiles += 1
                why = reasons.get(graph.compile_id, "another variant of the step")
                self._emit(Recompiled(step=self._step(), region=graph.region, reason=why))

    def _compared(self, graph: Graph) -> None:
        parity = graph.parity
        if parity is None:
            return
        self._emit(
            ParityChecked(
                step=self._step(),
                region=graph.region,
                agrees=parity.agrees,
                error=math.nan if parity.error is None else parity.error,
                reason=parity.reason,
            )
        )

    def fell_back(self, region: str, reason: str) -> None:
        """A region runs eagerly from now on."""
        self._emit(Fallback(step=self._step(), region=region, reason=reason))
