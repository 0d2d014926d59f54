"""A callback for tests, and what two trainings have to share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_hotcompile import HotCompile, Report
from tests.models import fit, seeded, weights

ALWAYS_LOGGED = (
    "phase",
    "eager_ms",
    "compiled_ms",
    "speedup",
    "compile_s",
    "stall_s",
    "saved_s",
    "total_speedup",
    "recompiles",
    "graph_breaks",
    "parity_error",
)
"""Scalars of a run that was measured on the CPU, whatever its length."""

STEP: dict[str, Any] = {"scope": "step", "compile_optimizer": False}
"""Where the optimizer is not the point: compiling it takes longer than all the rest."""


def hot(**options: Any) -> HotCompile:
    """A callback that flips after three steps and keeps what it compiled, however fast."""
    settings = {
        "threshold": 3,
        "backend": "aot_eager",
        "cost_gate": False,
        "min_speedup": 0.0,
        "on_error": "raise",
        "fused_optimizer": False,  # so that there is an optimizer to compile
        "prewarm": False,  # one thread on two cores would have it compile ahead, and runs here are short
    }
    return HotCompile(**{**settings, **options})


class Counting:
    """A backend that runs graphs as they are and counts them and their runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def assert_same(a: nn.Module, b: nn.Module, tolerance: float = 1e-4) -> None:
    """Two models have the same keys and, within the tolerance, the same weights."""
    first, second = weights(a), weights(b)
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(
            value, second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_proven(report: Report) -> None:
    """Something was compiled, and compiled code ran in each region."""
    assert report.regions, report.to_text()
    assert all(region.proven for region in report.regions), report.to_text()


def assert_compiled_as_eager(model_class: type[pl.LightningModule], **options: Any) -> None:
    """A training by Inductor has one region, which ran compiled, and the weights of one without it."""
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(**{"backend": "inductor", "scope": "step", "compile_optimizer": False, **options})
    fit(plain)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert region.proven, region
    assert_same(plain, model)
