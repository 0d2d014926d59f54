"""Tracing that does not end is ended, and the step runs as the user wrote it."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.tracing.tracing_limit import TracingLimit
from tests.elsewhere import threads_may_compile
from tests.functions import turned
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm signal"),
    pytest.mark.usefixtures("own_alarm"),
]

TURNS = 60_000


@pytest.fixture
def compiled_once() -> None:
    """What the first compile of a process imports takes longer than what is compiled then."""
    torch.compile(turned, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()


class Turning(nn.Module):
    """A loop that eager runs in a moment, and that is unrolled when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(TURNS):
            x = x + 1e-6
        return x + self.shift


class Long(Net):
    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.blocks = nn.ModuleList([Turning(), Turning()])


def test_a_loop_that_is_unrolled_for_too_long_stays_eager() -> None:
    plain, model = seeded(Long), seeded(Long)
    callback = hot(scope="step", compile_timeout=1.0, compile_optimizer=False, on_error="eager")
    fit(plain, max_steps=8, max_epochs=-1)
    fit(model, [callback], max_steps=8, max_epochs=-1)
    assert callback.report.phase == "reverted"
    assert "took longer than compile_timeout=1 s" in callback.report.reason
    assert_same(plain, model, tolerance=0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_all_else_is_compiled(compiled_once: None) -> None:
    plain, model = seeded(Long), seeded(Long)
    callback = hot(scope="module", compile_timeout=8.0, compile_optimizer=True, on_error="eager")
    fit(plain, max_steps=8, max_epochs=-1)
    fit(model, [callback], max_steps=8, max_epochs=-1)
    assert_same(plain, model)
    assert callback.report.phase == "settling", callback.report.reason
    slow, *others = sorted(callback.report.regions, key=lambda region: region.name != "blocks.*")
    assert (slow.runs, slow.note) == (0, "took longer than compile_timeout=8 s")
    assert all(region.runs for region in others), others
    assert [region.name for region in others] == ["inp", "head", "optimizer 0"]


def test_frames_below_it_are_refused_at_once() -> None:
    """Dynamo goes on with the functions that the refused one calls."""
    traced: list[int] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        for _ in range(TURNS):
            x = x * 1
        return inner(x)

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph.forward

    with compiling_allowed(suppress_errors=True):
        with TracingLimit(0.3):
            result = torch.compile(outer, backend=backend)(torch.ones(2))
        assert traced == []
        torch.compile(turned, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    torch.testing.assert_close(result, torch.full((2,), 2.0))
    assert len(traced) == 1, "another call has time of its own"


@pytest.mark.parametrize("seconds", [60.0, None])
def test_nothing_is_begun_after_an_end_before_the_time_is_up(seconds: float | None) -> None:
    begun: list[Any] = []
    limit = TracingLimit(seconds)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    def backend(graph: Any, inputs: Any) -> Any:
        begun.append(graph)
        limit.end("the job ends")
        return graph.forward

    with compiling_allowed(suppress_errors=True), limit:
        result = torch.compile(function, backend=backend)(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 4.0))
    assert (len(begun), limit.reached) == (1, "the job ends")


def test_what_is_compiled_at_run_time_is_left_alone() -> None:
    """There is no frame that could run as the user wrote it."""
    limit = TracingLimit(60.0)
    with limit:
        (start,) = [each for each in callback_handler.start_callbacks if each == limit._on_start]
        start(CallbackArgs(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"))
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        start(CallbackArgs(CallbackTrigger.DYNAMO, "0/0"))
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert limit._on_start not in callback_handler.start_callbacks


def test_the_limit_of_a_call_covers_the_regions_that_it_calls() -> None:
    """They would be taken back in the order in which they were set."""
    before = signal.getsignal(signal.SIGALRM)
    outer, inner = TracingLimit(60.0), TracingLimit(60.0)
    with outer, inner:
        arguments = CallbackArgs(CallbackTrigger.DYNAMO, "0/0")
        for limit in (outer, inner):
            limit._on_start(arguments)
        for limit in (outer, inner):
            limit._on_end(arguments)
        assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_of_dynamo_nothing_is_interrupted() -> None:
    """Where another thread compiles as well, the end of ours is told later."""
    limit = TracingLimit(0.01)
    with limit:
        limit._on_start(CallbackArgs(CallbackTrigger.DYNAMO, "0/0"))
        threading.Event().wait(0.1)
    assert limit.reached is None


@threads_may_compile
def test_what_another_thread_compiles_is_of_no_call_of_this_one() -> None:
    """Dynamo compiles for one thread at a time: a call that waits for it is told of the other's frames."""
    limit = TracingLimit(60.0)
    limit.reached = "took too long"
    other = torch.compile(turned, backend="eager", fullgraph=True)
    with limit, ThreadPoolExecutor(1) as threads:
        threads.submit(other, torch.ones(2)).result()
    assert limit.frames == 0


@threads_may_compile
def test_what_a_backward_compiles_in_a_thread_of_its_own_is_of_the_call() -> None:
    limit = TracingLimit(60.0)

    def backward(x: Tensor) -> None:
        x.register_hook(torch.compile(lambda gradient: gradient * 2, backend="eager"))
        (x * 3).sum().backward()

    with limit, ThreadPoolExecutor(1) as threads:
        threads.submit(backward, torch.ones(2, requires_grad=True)).result()
    assert limit.frames == 1


class TimeIsUp(Exception):
    """What a handler of the user's raises."""


def test_a_timer_that_ran_out_meanwhile_rings_after_dynamos_own_end(compiled_once: None) -> None:
    """There its error would be lost, and leave a compile that is never over for Dynamo, which counts them."""

    def ring(*_: Any) -> None:
        raise TimeIsUp

    def backend(graph: Any, inputs: Any) -> Any:
        threading.Event().wait(0.2)
        return graph.forward

    def slow_end(_: Any) -> None:
        """As where another process has the core."""
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass

    def step() -> None:
        callback_handler.register_end_callback(slow_end)  # after that of the limit
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        torch.compile(turned, backend=backend)(torch.ones(2))
        callback_handler.remove_end_callback(slow_end)
        threading.Event().wait(10.0)

    signal.signal(signal.SIGALRM, ring)
    with compiling_allowed(suppress_errors=True), TracingLimit(60.0), pytest.raises(TimeIsUp):
        step()
    torch._dynamo.reset()
