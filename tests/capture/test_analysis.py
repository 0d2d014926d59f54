"""What a profiler's trace says; the traces here are made up."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hotcompile.capture.analysis import STEP_NAME, Analysis, analyse


def slice_(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 7, "tid": tid}


def step(ts: float, dur: float = 100.0) -> dict[str, Any]:
    return slice_(STEP_NAME, "user_annotation", ts, dur)


def op(ts: float, dur: float = 5.0, name: str = "aten::mm", tid: int = 1) -> dict[str, Any]:
    return slice_(name, "cpu_op", ts, dur, tid)


def region(ts: float, dur: float, name: str = "Torch-Compiled Region: 0/0", tid: int = 1) -> dict[str, Any]:
    return slice_(name, "cpu_op", ts, dur, tid)


def test_nothing_is_nothing() -> None:
    assert analyse([]) == Analysis(steps=0)
    assert analyse([op(0.0), {"ph": "M", "name": "process_name"}]) == Analysis(steps=0)


def test_the_share_is_that_of_the_union_within_steps() -> None:
    events = [
        step(0.0),
        step(200.0),
        region(10.0, 40.0),
        region(20.0, 10.0, "CompiledFunction"),  # inside of the first one
        region(45.0, 15.0, "## Call CompiledFxGraph abc ##"),  # goes on beyond it
        region(70.0, 10.0, "CompiledFunctionBackward", tid=2),  # autograd's thread
        region(90.0, 30.0),  # ends after the step
        region(120.0, 50.0),  # between the steps
        region(150.0, 400.0, "Torch-Compiled Regional"),  # an ordinary name that begins alike counts
    ]
    found = analyse(events)
    assert found.steps == 2
    assert found.step_ms == 0.1
    assert found.compiled_share == pytest.approx((50 + 10 + 10 + 100) / 200)


def test_a_trace_without_compiled_code_has_a_share_of_nothing() -> None:
    assert analyse([step(0.0), op(1.0)]).compiled_share == 0.0


def test_operators_count_once_whoever_they_call() -> None:
    events = [
        step(0.0),
        op(1.0, 20.0, "aten::linear"),
        op(1.0, 19.0, "aten::addmm"),  # begins together with its caller
        op(10.0, 5.0, "aten::copy_"),
        op(21.0),  # begins where the one before ends
        op(5.0, tid=2),
        slice_("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 40.0, 20.0),
        op(41.0),
        op(150.0),  # after the step
        step(200.0),
        op(201.0),
    ]
    assert analyse(events).operators_per_step == (4 + 1) / 2


def test_launches_are_those_of_the_host_in_steps() -> None:
    events = [
        step(0.0),
        slice_("cudaLaunchKernel", "cuda_runtime", 1.0, 1.0),
        slice_("cuLaunchKernelEx", "cuda_driver", 3.0, 1.0),
        slice_("cudaMemcpyAsync", "cuda_runtime", 5.0, 1.0),
        slice_("cudaLaunchKernel", "cuda_runtime", 150.0, 1.0),
        slice_("a_kernel", "kernel", 7.0, 30.0, tid=9),
        slice_(STEP_NAME, "gpu_user_annotation", 2.0, 500.0, tid=9),
    ]
    found = analyse(events)
    assert found.steps == 1
    assert found.launches_per_step == 2.0


def test_without_a_device_launches_are_not_known() -> None:
    assert analyse([step(0.0), op(1.0)]).launches_per_step is None
    assert analyse([step(0.0), slice_("k", "kernel", 1.0, 1.0)]).launches_per_step == 0.0


def test_odd_records_do_no_harm() -> None:
    odd: list[dict[str, Any]] = [
        {"ph": "X"},
        {"ph": "X", "ts": "1", "name": STEP_NAME, "cat": "user_annotation"},
        {"ph": "X", "ts": 5.0, "name": 3, "cat": "cpu_op", "dur": None},
        {},
    ]
    assert analyse([*odd, step(0.0), op(1.0)]).operators_per_step == 1.0
