"""A suite and measurements made up for tests: nothing is compiled."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from lightning_hotcompile.bench.measurement import ArmResult, Measurement, Request
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.bench.suite import Suite

ROWS: Mapping[str, Any] = {
    "quick": [{"case": "mixed", "batch_size": 8, "width": 16}],
    "default": [
        {"case": "simple", "batch_size": 8, "width": [16, 32]},
        {"case": "attention", "batch_size": 2, "seq_len": 16, "d_model": 8},
    ],
}


def a_suite(**changes: Any) -> Suite:
    return Suite(**{"name": "made-up", "rows": ROWS, **changes})


def times(*milliseconds: float, rounds: int = 20) -> dict[str, list[float]]:
    """So many equal steps: forward, backward, optimizer."""
    names = ("forward", "backward", "optimizer")
    return {n: [ms / 1e3] * rounds for n, ms in zip(names, milliseconds, strict=False)}


def measured(
    eager: tuple[float, ...] = (2.0, 4.0), compiled: tuple[float, ...] = (1.0, 2.0), **changes: Any
) -> Measurement:
    """Eager and compiled, in milliseconds of each part; compiling took 12 s."""
    arm = ArmResult(
        compiled=True,
        laps=times(*compiled),
        warmup_s=12.5,
        compile_s=12.0,
        graphs=1,
        compiled_ops=5,
        runs_per_step=1,
        parity="agrees",
        parity_error=1e-7,
    )
    for name, value in changes.items():
        setattr(arm, name, value)
    return Measurement(
        arms={"eager": ArmResult(compiled=False, laps=times(*eager), warmup_s=0.1), "compiled": arm},
        parameters=3,
    )


class FakeMeasure:
    """Remembers what it was asked for; answers by workload with a measurement or an error."""

    def __init__(self, answers: Mapping[str, Measurement | RunFailed] | None = None) -> None:
        self.requests: list[Request] = []
        self.limits: list[float] = []
        self._answers = answers or {}
        self.stop_after: int | None = None

    def __call__(self, request: Request, limit_s: float) -> Measurement:
        if self.stop_after is not None and len(self.requests) >= self.stop_after:
            raise KeyboardInterrupt
        self.requests.append(request)
        self.limits.append(limit_s)
        answer = self._answers.get(request.workload) or measured()
        if isinstance(answer, RunFailed):
            raise answer
        return answer


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
