"""One arm in the process that measures it: a step, and what the compiler did for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hotcompile.bench.laps import LapClock
from lightning_hotcompile.bench.measurement import ERROR, INVALID, OOM, ArmResult
from lightning_hotcompile.bench.workloads.workload import Workload
from lightning_hotcompile.errors import first_line
from lightning_hotcompile.swap.compile_timer import CompileTimer
from lightning_hotcompile.swap.dynamo import graph_break_count
from lightning_hotcompile.swap.graphs.graph import Graph
from lightning_hotcompile.swap.graphs.witness import Witness


@dataclass(kw_only=True)
class Part:
    """The forward or the optimizer's step of one or two arms; ``region`` is its name for the witness."""

    call: Callable[..., Any]
    region: str = ""
    compile_s: float = 0.0
    graph_breaks: int = 0
    graphs_at_first: int = 0

    @property
    def compiled(self) -> bool:
        """Whether compiled code is to run."""
        return bool(self.region)


@dataclass(kw_only=True)
class Arm:
    """How one arm runs the workload."""

    forward: Part
    step: Part | None = None
    optimizer: Optimizer | None = None
    result: ArmResult
    runs: set[int] = field(default_factory=set)
    """How often compiled code ran, in each step that counts."""

    @property
    def parts(self) -> list[Part]:
        """Those that are to run compiled."""
        return [p for p in (self.forward, self.step) if p is not None and p.compiled]


class Steps:
    """Runs steps of any arm on one workload.

    Args:
        workload: what is run.
        clock: times its parts.
        timer: adds up time in the compiler.
        witness: knows what ran.
    """

    def __init__(self, workload: Workload, clock: LapClock, timer: CompileTimer, witness: Witness) -> None:
        self._work, self._clock, self._timer, self._witness = workload, clock, timer, witness
        self._cotangent: Tensor | None = None

    def step(self, arm: Arm) -> dict[str, float]:
        """One step: seconds of its parts."""
        _forget_gradients(self._work.module, self._work.inputs)
        with torch.set_grad_enabled(self._work.training):
            self._clock.start()
            self._forward_and_backward(arm)
        self._optimizer(arm)
        return self._clock.stop()

    def first_step(self, arm: Arm) -> None:
        """One step that writes down what was compiled in it."""
        _forget_gradients(self._work.module, self._work.inputs)
        self._clock.start()
        with self._booked(arm.forward), torch.set_grad_enabled(self._work.training):
            self._forward_and_backward(arm)
        if arm.step is not None:
            with self._booked(arm.step):
                self._optimizer(arm)
        self._clock.stop()

    def _forward_and_backward(self, arm: Arm) -> None:
        out = arm.forward.call(*self._work.inputs)
        self._clock.lap("forward")
        if self._work.training:
            out.backward(self._like(out))
            self._clock.lap("backward")

    def _optimizer(self, arm: Arm) -> None:
        if arm.step is not None:
            arm.step.call()
            self._clock.lap("optimizer")

    def _like(self, out: Tensor) -> Tensor | None:
        if not out.dim():
            return None
        if self._cotangent is None:
            made = torch.Generator().manual_seed(3)
            self._cotangent = torch.randn(out.shape, generator=made).to(out)
        return self._cotangent

    @contextlib.contextmanager
    def _booked(self, part: Part) -> Iterator[None]:
        seconds, breaks = self._timer.seconds, graph_break_count()
        yield
        part.compile_s += self._timer.seconds - seconds
        part.graph_breaks += graph_break_count() - breaks
        if part.compiled:
            part.graphs_at_first = part.graphs_at_first or len(self._witness.graphs_of(part.region))

    def runs(self, arm: Arm) -> int:
        """How often compiled code of an arm ran so far."""
        return sum(self._witness.runs_of(p.region) for p in arm.parts)

    def account(self, arm: Arm, limits: list[str]) -> None:
        """Write down what the compiler did for an arm, and whether its times are to be believed."""
        result, parts = arm.result, arm.parts
        if not parts:
            return
        graphs = [g for p in parts for g in self._witness.graphs_of(p.region)]
        result.compile_s = sum(p.compile_s for p in parts)
        result.warmup_s += result.compile_s  # of all parts, also of one that another arm has compiled
        result.graph_breaks = sum(p.graph_breaks for p in parts)
        result.graphs = len(graphs)
        result.recompiles = len(graphs) - sum(p.graphs_at_first for p in parts)
        result.compiled_ops = sum(g.n_ops for g in graphs)
        result.runs_per_step = min(arm.runs, default=0)
        result.parity, result.parity_error = parity_of(graphs)
        if result.status == "ok":
            reason = why_invalid(arm.runs, graphs, limits)
            for part in parts:
                reason = reason or self._idle(part)
            if reason:
                result.status, result.reason = INVALID, reason

    def _idle(self, part: Part) -> str:
        ran = self._witness.runs_of(part.region)
        return "" if ran else f"the compiled code of {part.region} did not run"


def why_invalid(runs: set[int], graphs: list[Graph], limits: list[str]) -> str:
    """Why the times of an arm are not those of compiled code; empty if they are."""
    errors = [g.error for g in graphs if g.error]
    wrong = [g.parity for g in graphs if g.parity is not None and g.parity.failed]
    if limits:
        return f"the recompile limit was hit, so eager code ran: {limits[0]}"
    if errors:
        return f"eager code ran for a graph: {errors[0]}"
    if not runs or min(runs) == 0:
        return "the compiled code did not run in each step"
    if len(runs) > 1:
        return f"compiled code ran {min(runs)} to {max(runs)} times a step: some of it was eager now and then"
    if wrong:
        return f"the compiled code is not right: {wrong[0].reason}"
    return ""


def parity_of(graphs: list[Graph]) -> tuple[str, float | None]:
    """``agrees``, ``differs``, or what could not be compared; and the largest difference."""
    found = [g.parity for g in graphs if g.parity is not None]
    errors = [p.error for p in found if p.error is not None]
    if not found:
        return "not measured", None
    if any(p.failed for p in found):
        return "differs", max(errors, default=None)
    untold = [p for p in found if p.agrees is None]
    if untold:
        return f"{len(untold)} of {len(found)} graphs {untold[0].reason}", max(errors, default=None)
    return "agrees", max(errors, default=None)


def failed(result: ArmResult, error: BaseException) -> None:
    """An arm could not go on."""
    result.status = OOM if is_out_of_memory(error) else ERROR
    result.reason = first_line(error)[:500]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Also below the compiler's own error, and for the allocator of the CPU."""
    while error is not None:
        words = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in words:
            return True
        if "CUDA out of memory" in words:
            return True
        error = error.__cause__ or error.__context__
    return False


class LimitWatch(logging.Handler):
    """Hears that Dynamo has given up compiling: it says so in a log line only."""

    _LOGGER = "torch._dynamo.convert_frame"

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line of what is about the limit."""
        message = record.getMessage()
        if "recompile_limit" in message or "cache_size_limit" in message:
            self.heard.append(message.strip().splitlines()[0])

    def __enter__(self) -> LimitWatch:
        logging.getLogger(self._LOGGER).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(self._LOGGER).removeHandler(self)


def _forget_gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    module.zero_grad(set_to_none=True)
    for x in inputs:
        x.grad = None
