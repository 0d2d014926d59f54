"""One configuration in this process: arms in turns, and rows that are not to be believed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_hotcompile.bench.laps import HostLaps
from lightning_hotcompile.bench.measure import measure
from lightning_hotcompile.bench.measurement import Measurement, Request
from lightning_hotcompile.bench.workloads.workload import Compile, MakeArm, Workload
from lightning_hotcompile.errors import HotCompileWarning

ROUNDS = 12


class Scaled(nn.Module):
    """Two operations; ``calls`` are its eager ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def a_workload(**changes: Any) -> Workload:
    work = Workload(module=Scaled(), inputs=(torch.linspace(0, 1, 4),))
    return dataclasses.replace(work, **changes)


def run(
    work: Workload, *, backend: Any = None, rounds: int = ROUNDS, warmup: int = 2, only: str = ""
) -> Measurement:
    request = Request(workload="", sizes={}, warmup=warmup, rounds=rounds, backend="eager", only=only)
    ticks = itertools.count()
    return measure(request, workload=work, backend=backend, clock=HostLaps(lambda: float(next(ticks))))


def with_arm(make: MakeArm) -> Workload:
    return a_workload(arms={"compiled": make})


def test_both_arms_run_as_often_on_the_same_weights() -> None:
    found = run(a_workload())
    eager, compiled = found.arms["eager"], found.arms["compiled"]
    assert (eager.status, compiled.status) == ("ok", "ok")
    assert {len(lap) for arm in (eager, compiled) for lap in arm.laps.values()} == {ROUNDS}
    assert list(compiled.laps) == ["forward", "backward"]
    assert eager.laps["forward"] == [1.0] * ROUNDS  # the clock moves by one with each look
    assert (compiled.graphs, compiled.graph_breaks, compiled.recompiles) == (1, 0, 0)
    assert compiled.compiled_ops == 2
    assert compiled.runs_per_step == 1
    assert compiled.parity == "agrees"
    assert compiled.compile_s > 0
    assert eager.compile_s == 0
    assert found.parameters == 4


def test_arms_alternate_in_both_directions() -> None:
    order: list[str] = []

    def spied(name: str) -> Callable[..., Tensor]:
        def call(x: Tensor) -> Tensor:
            order.append(name)
            return x.requires_grad_().sum()

        return call

    work = a_workload(arms={}, others={"a": spied("a"), "b": spied("b")})
    run(work, rounds=2, warmup=1)
    timed, for_memory = "".join(order[-6:-2]), "".join(order[-2:])
    assert (timed, for_memory) == ("abba", "ab")


def test_a_forward_only_workload_has_no_backward_and_no_gradients() -> None:
    work = a_workload(training=False)
    found = run(work)
    assert list(found.arms["compiled"].laps) == ["forward"]
    assert work.module.scale.grad is None


def test_the_optimizer_is_measured_eager_and_compiled() -> None:
    work = a_workload(make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    found = run(work)
    assert list(found.arms) == ["eager", "compiled", "compiled+optimizer"]
    assert all(arm.status == "ok" for arm in found.arms.values())
    assert all(list(arm.laps) == ["forward", "backward", "optimizer"] for arm in found.arms.values())
    alone, both = found.arms["compiled"], found.arms["compiled+optimizer"]
    assert both.graphs > alone.graphs
    assert both.compile_s > alone.compile_s > 0
    assert both.runs_per_step == 2
    assert alone.warmup_s > alone.compile_s
    assert both.warmup_s > both.compile_s


def test_code_that_was_never_compiled_is_invalid() -> None:
    found = run(with_arm(lambda module, compile_function: module)).arms["compiled"]
    assert (found.status, found.reason) == ("INVALID", "the compiled code did not run in each step")


def test_code_that_runs_compiled_now_and_then_is_invalid() -> None:
    def every_other(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
        compiled, calls = compile_function(lambda m, x: m(x)), itertools.count()
        return lambda x: compiled(module, x) if next(calls) % 2 == 0 else module(x)

    found = run(with_arm(every_other)).arms["compiled"]
    assert found.status == "INVALID"
    assert "did not run in each step" in found.reason


def new_number_each_time(last: int) -> MakeArm:
    """An integer that is a constant of the graph, and another one in each of the first calls."""

    def make(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
        compiled, calls = compile_function(lambda m, x, n: m(x) * n), itertools.count()
        return lambda x: compiled(module, x, min(next(calls), last))

    return make


def test_the_recompile_limit_makes_a_row_invalid_and_never_1x() -> None:
    found = run(with_arm(new_number_each_time(10_000)), warmup=12).arms["compiled"]
    assert found.status == "INVALID"
    assert "recompile limit was hit" in found.reason


def test_recompiles_before_the_steps_that_count_are_told() -> None:
    found = run(with_arm(new_number_each_time(3)), warmup=6).arms["compiled"]
    assert (found.status, found.graphs, found.recompiles) == ("ok", 4, 3)


def test_compiling_while_it_is_measured_makes_a_row_invalid() -> None:
    def late(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
        compiled, calls = compile_function(lambda m, x, n: m(x) * n), itertools.count()
        return lambda x: compiled(module, x, 1 if next(calls) < 8 else 2)

    found = run(with_arm(late)).arms["compiled"]
    assert (found.status, found.reason) == ("INVALID", "something was compiled while it was measured")


def test_graph_breaks_are_counted() -> None:
    def broken(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
        def call(m: nn.Module, x: Tensor) -> Tensor:
            y = m(x)
            torch._dynamo.graph_break()
            return y.cos()

        compiled = compile_function(call)
        return lambda x: compiled(module, x)

    found = run(with_arm(broken)).arms["compiled"]
    assert (found.status, found.graph_breaks, found.graphs, found.runs_per_step) == ("ok", 1, 2, 2)


def wrong_backend(graph_module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return lambda *args: tuple(1.5 * out for out in graph_module.forward(*args))


def test_code_that_computes_something_else_is_invalid() -> None:
    with pytest.warns(HotCompileWarning, match="not right"):
        found = run(a_workload(), backend=wrong_backend).arms["compiled"]
    assert (found.status, found.parity) == ("INVALID", "differs")
    assert "not right" in found.reason


class TooLarge(Scaled):
    """Out of memory in eager or in compiled code only."""

    def __init__(self, when_compiling: bool) -> None:
        super().__init__()
        self.when_compiling = when_compiling

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() == self.when_compiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return super().forward(x)


def test_eager_out_of_memory_does_not_hide_the_compiled_arm() -> None:
    found = run(a_workload(module=TooLarge(when_compiling=False))).arms
    assert found["eager"].status == "OOM"
    assert "Tried to allocate" in found["eager"].reason
    assert found["compiled"].status == "ok"
    assert len(found["compiled"].laps["forward"]) == ROUNDS


def test_compiled_out_of_memory_does_not_hide_the_eager_arm() -> None:
    def too_large(graph_module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    found = run(a_workload(), backend=too_large).arms
    assert found["compiled"].status == "OOM"
    assert found["eager"].status == "ok"
    assert len(found["eager"].laps["forward"]) == ROUNDS


def test_an_error_of_one_arm_is_its_own() -> None:
    def fails(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
        raise ValueError("cannot be made")

    found = run(with_arm(fails)).arms
    assert (found["compiled"].status, found["compiled"].reason) == ("ERROR", "ValueError: cannot be made")
    assert found["eager"].status == "ok"


def test_arms_can_be_measured_apart() -> None:
    assert list(run(a_workload(), only="eager").arms) == ["eager"]
    assert list(run(a_workload(), only="compiled").arms) == ["compiled"]


def test_a_measurement_survives_its_way_through_json() -> None:
    found = run(a_workload())
    assert Measurement.from_dict(found.to_dict()) == found
