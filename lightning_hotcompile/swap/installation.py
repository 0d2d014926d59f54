"""A whole plan put into the running model: islands, regions, and the proof that it ran."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.optim import Optimizer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.compile_timer import CompileTimer
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.kept_buffers import KeepsBuffers
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.inductor.compiler_ways import compiler_ways
from lightning_hotcompile.swap.inductor.cpp_beside import EarlyToolchain
from lightning_hotcompile.swap.inductor.draws import DrawsStaySeparate
from lightning_hotcompile.swap.inductor.silent_imports import import_in_silence
from lightning_hotcompile.swap.islands import IslandGuard
from lightning_hotcompile.swap.letting_go import forget_gone_functions
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.shared import Shared
from lightning_hotcompile.swap.steplog import SwappedStep
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from lightning_hotcompile.swap.tracing.breaks import GraphBreak

OPTIMIZER = "optimizer"
"""The part of a plan that is its optimizers; the other part has the name of the scope."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Whether compiled code of one region ran: graphs, calls that were to use it, runs, backend seconds.

    ``could_compile``: whether one of these calls came while code was being compiled.
    """

    region: Region
    graphs: int
    calls: int
    could_compile: bool
    runs: int
    compile_s: float
    error: str | None
    taken_back: str | None = None
    """Why it is eager again though its compiled code is right."""

    @property
    def proven(self) -> bool:
        """Compiled code of this region has run."""
        return self.error is None and self.runs > 0

    @property
    def mostly_eager(self) -> bool:
        """Compiled code ran in less than half of the calls that were to use it."""
        return self.proven and not self.taken_back and 2 * self.runs < self.calls


def _running_in(root: nn.Module) -> Callable[[], str | None]:
    """Tells what Lightning is running. Dynamo keeps backends, and so gates, longer than there is a model."""
    there = weakref.ref(root)

    def running() -> str | None:
        module = there()
        return None if module is None else vars(module).get("_current_fx_name")

    return running


class Installation:
    """Everything that is changed in a model while it is compiled, and the way back.

    Args:
        plan: what to compile.
        root: the LightningModule.
        config: backend, mode, options, dynamic, fullgraph, on_error.
        optimizers: the Trainer's optimizers, in the plan's order.
        shared: with the other installations of one stage of a training.
    """

    def __init__(
        self,
        plan: CompilePlan,
        root: nn.Module,
        config: HotCompileConfig,
        optimizers: Sequence[Optimizer],
        shared: Shared | None = None,
    ) -> None:
        self.plan = plan
        self._shared = shared or Shared(optimizers)
        self.gate = Gate(
            suppress_errors=config.on_error != "raise",
            running=_running_in(root),
            limit_s=config.compile_timeout,
        )
        self.timer = CompileTimer(counts=lambda: self.gate.lane is Lane.COMPILE)
        self.witness = Witness(
            config.backend,
            mode=config.mode,
            options=config.options,
            parity=config.parity,
            random=config.random,
            compile_timeout=config.compile_timeout,
            backward_outside=bool(getattr(root, "automatic_optimization", False)),
            raise_errors=config.on_error == "raise",
            on_failure=self.gate.failed,
            names=self._shared.names,
        )
        self._root = root
        self._config = config
        self._islands = IslandGuard(root, [i.name for i in plan.islands])
        self._optimizers = optimizers
        self._swapped = [self._swap(region) for region in plan.regions]
        self._toolchain = EarlyToolchain(root, config.options)
        self.in_place = False

    @cached_property
    def _torch_settings(self) -> Sequence[AbstractContextManager[object]]:
        """What torch does otherwise meanwhile; where graphs are collected no compiler is at work."""
        if self._config.backend != "inductor" or self.witness.collect is not None:
            return (KeepsBuffers(), DrawsStaySeparate())
        return (KeepsBuffers(), *compiler_ways(), self._toolchain)

    def _swap(self, region: Region) -> SwappedRegion:
        dynamic = self._config.dynamic if isinstance(self._config.dynamic, bool) else None
        if region.kind == "optimizer":
            return SwappedOptimizer(
                region,
                self.gate,
                self.witness,
                optimizer=self._optimizers[int(region.members[0])],
                dynamic=dynamic,
                first_settings=self._shared.first_settings,
            )
        kind = SwappedStep if region.kind == "step" else SwappedRegion
        return kind(region, self.gate, self.witness, dynamic=dynamic, fullgraph=self._config.fullgraph)

    @property
    def optimizers(self) -> list[SwappedOptimizer]:
        """The optimizers whose step is part of the plan."""
        return [swapped for swapped in self._swapped if isinstance(swapped, SwappedOptimizer)]

    def put(self) -> None:
        """Change the model: the next step on the lane that compiles does so at each region's first call."""
        self.in_place = True
        forget_gone_functions()
        import_in_silence()
        for setting in self._torch_settings:
            setting.__enter__()
        self.timer.start()
        self._islands.put()
        for swapped in self._swapped:
            if swapped.taken_back is None and self._error_of(swapped) is None:
                swapped.put(self._root)

    def drop_failed(self) -> list[tuple[str, str]]:
        """Take out the regions that failed: pairs of name and reason, new ones only."""
        dropped = []
        for swapped in self._swapped:
            reason = self._error_of(swapped)
            if reason is not None and swapped.is_in_place:
                swapped.error = reason
                swapped.take_out()
                dropped.append((swapped.region.name, reason))
        return dropped

    @property
    def parts(self) -> dict[str, frozenset[str]]:
        """What can be taken back by itself: the optimizers, and all else; with the names of the regions."""
        parts: dict[str, set[str]] = {}
        for swapped in self._swapped:
            if swapped.is_in_place and swapped.error is None:
                parts.setdefault(self._part_of(swapped), set()).add(swapped.region.name)
        return {name: frozenset(regions) for name, regions in parts.items()}

    def _part_of(self, swapped: SwappedRegion) -> str:
        return OPTIMIZER if swapped.region.kind == "optimizer" else self.plan.scope

    def take_back(self, part: str, reason: str) -> list[str]:
        """Let one part be eager from now on, in place or not; the names of its regions."""
        found = [s for s in self._swapped if self._part_of(s) == part and s.taken_back is None]
        for swapped in found:
            swapped.taken_back = reason
            swapped.take_out()
        return [swapped.region.name for swapped in found]

    @property
    def taken_back(self) -> tuple[str, ...]:
        """The parts that are eager though their compiled code is right."""
        return tuple(dict.fromkeys(self._part_of(s) for s in self._swapped if s.taken_back is not None))

    @property
    def happened(self) -> tuple[int, int]:
        """How often something failed, and how many graphs were compiled."""
        return len(self.gate.failures), len(self.witness.graphs)

    @property
    def is_lost_anywhere(self) -> bool:
        """Whether a region has compiled code that does not fit its calls any longer."""
        return any(s.fit.is_lost and s.error is None and s.taken_back is None for s in self._swapped)

    def _error_of(self, swapped: SwappedRegion) -> str | None:
        return self.witness.error_of(swapped.region.name) or swapped.error

    @property
    def first_error(self) -> str | None:
        """Of a region that failed, ``None`` if none has."""
        return next(filter(None, map(self._error_of, self._swapped)), None)

    @property
    def has_failed(self) -> bool:
        """Whether all regions have failed but those that were taken back: none of them is compiled again."""
        kept = [s for s in self._swapped if s.taken_back is None]
        return bool(kept) and all(map(self._error_of, kept))

    @property
    def anything_left(self) -> bool:
        """Whether any region is still compiled."""
        return any(s.is_in_place for s in self._swapped)

    def take_out(self) -> None:
        """Change everything back; a second call does nothing."""
        self.gate.close()
        for swapped in reversed(self._swapped):
            swapped.take_out()
        self._islands.take_out()
        self.timer.stop()
        if self.in_place:
            for setting in reversed(self._torch_settings):
                setting.__exit__(None, None, None)
        self.in_place = False

    def end(self) -> None:
        """Change everything back for good, and wait for what was begun beside it."""
        self.take_out()
        self._toolchain.wait()

    def proofs(self) -> list[Proof]:
        """For each planned region what was seen of it."""
        return [self._proof(s) for s in self._swapped]

    def _proof(self, swapped: SwappedRegion) -> Proof:
        name = swapped.region.name
        graphs = [g for g in self.witness.graphs_of(name) if g.error is None]
        return Proof(
            region=swapped.region,
            graphs=len(graphs),
            calls=swapped.calls,
            could_compile=swapped.could_compile,
            runs=self.witness.runs_of(name),
            compile_s=sum(g.seconds for g in graphs),
            error=self._error_of(swapped),
            taken_back=swapped.taken_back,
        )

    @property
    def was_warm(self) -> bool | None:
        """Whether the compiler found all graphs in its cache; ``None`` if it found some of them."""
        hits = {bool(graph.cache_hit) for graph in self.witness.graphs}
        return None if len(hits) > 1 else hits == {True}

    @property
    def graph_breaks(self) -> tuple[GraphBreak, ...]:
        """Where Dynamo ended a graph before its function did."""
        return self.gate.breaks

    def why_nothing_ran(self) -> str:
        """The best explanation for compiled code that did not run."""
        if self.gate.failures:
            return self.gate.failures[-1]
        return "; ".join(["no graph was captured", *map(str, self.graph_breaks[-1:])])
