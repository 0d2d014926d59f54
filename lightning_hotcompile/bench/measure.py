"""Measures one configuration in this process: all arms in turns on the same weights and inputs."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.bench.arm_at_work import Arm, LimitWatch, Part, Steps, failed
from lightning_hotcompile.bench.laps import LapClock, clock_for
from lightning_hotcompile.bench.measurement import INVALID, OK, ArmResult, Measurement, Request
from lightning_hotcompile.bench.step_memory import peak_of_step_mb
from lightning_hotcompile.bench.workloads import catalogue
from lightning_hotcompile.bench.workloads.workload import (
    COMPILED,
    COMPILED_OPTIMIZER,
    EAGER,
    Workload,
    compiled_step,
)
from lightning_hotcompile.swap.compile_timer import CompileTimer
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.graphs.witness import Witness

_log = logging.getLogger(__name__)

LEAST_ROUNDS = 10
MORE_WARMUP = 5
"""So many further steps an arm may take until nothing is compiled any more."""


def measure(
    request: Request,
    *,
    workload: Workload | None = None,
    backend: CompiledFn | None = None,
    clock: LapClock | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Run the arms in turns: eager, compiled, compiled, eager, and so on.

    Args:
        request: what to measure.
        workload: in place of the one that the request names.
        backend: in place of the one that the request names.
        clock: times the parts of a step.
        now: a clock in seconds, for the limit of the whole.
    """
    work = workload or catalogue.build(request.workload, request.sizes, request.device)
    witness = Witness(backend or request.backend, parity="warn", random="backend", raise_errors=True)
    timer = CompileTimer()
    timer.start()
    try:
        with LimitWatch() as limits:
            steps = Steps(work, clock or clock_for(request.device), timer, witness)
            arms = make_arms(work, witness, request.only)
            for arm in arms.values():
                _warm_up(arm, steps, timer, request.warmup, now)
            witness.watch.armed = False
            _rounds(list(arms.values()), steps, timer, request, now)
            for arm in arms.values():
                steps.account(arm, limits.heard)
                _look_at_memory(arm, steps, request.device)
    finally:
        timer.stop()
    return Measurement(
        arms={name: arm.result for name, arm in arms.items()},
        note=work.note,
        parameters=sum(p.numel() for p in work.module.parameters()),
        facts=dict(work.facts),
    )


def make_arms(work: Workload, witness: Witness, only: str = "") -> dict[str, Arm]:
    """Eager and what it is compared with, then the compiled ones; nothing is compiled yet."""
    plain = _plain_step(work)
    arms: dict[str, Arm] = {}
    if only != COMPILED:
        calls: dict[str, Callable[..., Tensor]] = {EAGER: work.module, **work.others}
        for name, call in calls.items():
            arms[name] = _arm(Part(call=_within(work, call)), *plain)
    if only == EAGER:
        return arms
    for name, make in work.arms.items():
        forward = Part(call=work.module, region=name)
        arms[name] = _arm(forward, *plain)
        try:
            forward.call = _within(work, make(work.module, _compiler(witness, name)))
        except Exception as error:  # noqa: BLE001  # one arm's failure is not that of the others
            failed(arms[name].result, error)
        if name == COMPILED and work.make_optimizer is not None:
            arms[COMPILED_OPTIMIZER] = _arm(forward, *_compiled_step(work, witness))
    return arms


def _arm(forward: Part, step: Part | None, optimizer: Optimizer | None) -> Arm:
    is_compiled = forward.compiled or (step is not None and step.compiled)
    return Arm(forward=forward, step=step, optimizer=optimizer, result=ArmResult(compiled=is_compiled))


def _within(work: Workload, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if work.context is contextlib.nullcontext:
        return call

    def in_context(*inputs: Tensor) -> Tensor:
        with work.context():
            return call(*inputs)

    return in_context


def _plain_step(work: Workload) -> tuple[Part | None, Optimizer | None]:
    if work.make_optimizer is None:
        return None, None
    optimizer = work.make_optimizer(work.module)
    return Part(call=optimizer.step), optimizer


def _compiled_step(work: Workload, witness: Witness) -> tuple[Part | None, Optimizer | None]:
    """With an optimizer of its own: a compiled step changes options that an eager one reads."""
    assert work.make_optimizer is not None
    optimizer, region = work.make_optimizer(work.module), "optimizer"
    return Part(call=compiled_step(optimizer, _compiler(witness, region)), region=region), optimizer


def _compiler(witness: Witness, region: str) -> Callable[[CompiledFn], CompiledFn]:
    return lambda function: CompiledFunction(
        function, witness.backend_for(region), dynamic=False, fullgraph=False
    )


def _warm_up(arm: Arm, steps: Steps, timer: CompileTimer, number: int, now: Callable[[], float]) -> None:
    """Until nothing is compiled any more; what the first step does beside compiling is not counted."""
    result = arm.result
    if result.status != OK:
        return
    try:
        for i in range(max(1, number) + MORE_WARMUP):
            begin, compiling = now(), timer.seconds
            steps.first_step(arm)
            compiled_for = timer.seconds - compiling
            if not compiled_for:  # a step that compiles also compares with eager: its own time is not known
                result.warmup_s += now() - begin
            if i + 1 >= number and not compiled_for:
                return
    except Exception as error:  # noqa: BLE001  # one arm's failure is not that of the others
        failed(result, error)
        _let_go(arm)


def _rounds(
    arms: list[Arm], steps: Steps, timer: CompileTimer, request: Request, now: Callable[[], float]
) -> None:
    begin = now()
    for i in range(request.rounds):
        alive = [arm for arm in arms if arm.result.status == OK]
        if i >= LEAST_ROUNDS and now() - begin > request.seconds:
            return
        for arm in alive if i % 2 == 0 else alive[::-1]:
            _one(arm, arms, steps, timer, request.device)


def _one(arm: Arm, arms: list[Arm], steps: Steps, timer: CompileTimer, device: str) -> None:
    on_gpu, result = device.startswith("cuda"), arm.result
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runs, compiling = steps.runs(arm), timer.seconds
    try:
        laps = steps.step(arm)
    except Exception as error:  # noqa: BLE001  # one arm's failure is not that of the others
        failed(result, error)
        _let_go(arm)
        return
    arm.runs.add(steps.runs(arm) - runs)
    for name, seconds in laps.items():
        result.laps.setdefault(name, []).append(seconds)
    if timer.seconds > compiling:
        result.status, result.reason = INVALID, "something was compiled while it was measured"
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - _state_of_others(arm, arms)) / 2**20
        result.peak_memory_mb = max(peak, result.peak_memory_mb or 0.0)


def _look_at_memory(arm: Arm, steps: Steps, device: str) -> None:
    """One more step, which is not timed; on a GPU the allocator itself knows."""
    if arm.result.status != OK or device.startswith("cuda"):
        return
    try:
        arm.result.peak_memory_mb = peak_of_step_mb(functools.partial(steps.step, arm))
    except Exception as error:  # noqa: BLE001  # the times are there all the same
        _log.warning("peak memory was not measured: %s", error)


def _state_of_others(arm: Arm, arms: list[Arm]) -> int:
    """Bytes of optimizer state that only other arms use."""
    others = {id(a.optimizer): a.optimizer for a in arms if a.optimizer is not arm.optimizer}
    return sum(
        value.nbytes
        for optimizer in others.values()
        if optimizer is not None
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.is_cuda
    )


def _let_go(arm: Arm) -> None:
    """Free what an arm that failed has left behind."""
    if arm.optimizer is not None:
        arm.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
