"""The real compiler on a small model: right, proven, and its time on the books."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, seeded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

STEPS = 24

SCOPES: dict[str, dict[str, Any]] = {
    "step": {"scope": "step", "compile_optimizer": True},
    "regions": {"scope": "regions"},
    "pattern": {"scope": "pattern", "targets": ["blocks.*", "head"]},
}

KINDS = {"step": {"step", "optimizer"}, "regions": {"group", "module"}, "pattern": {"group", "module"}}


@pytest.mark.parametrize("name", SCOPES)
def test_trains_like_eager_and_proves_every_region(name: str) -> None:
    n_block = 1 if name == "step" else 2  # a group of regions is of two at least
    plain, model = seeded(Net, width=8, n_block=n_block), seeded(Net, width=8, n_block=n_block)
    callback = hot(backend="inductor", **SCOPES[name])
    options = {"max_epochs": 2, "val": loader(16)}
    without = fit(plain, **options)
    trainer = fit(model, [callback], **options)
    assert trainer.global_step == STEPS
    assert_same(plain, model, tolerance=1e-4)
    for key, value in without.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-4)
    report = callback.report
    assert report.regions
    assert {r.kind for r in report.regions} <= KINDS[name]
    for region in report.regions:
        assert region.proven, region.note
        assert region.runs > 0
        assert region.compile_s > 0
    assert report.compile_s > 0
    assert report.stall_s > 0
    assert report.recompiles == report.graph_breaks == 0
    assert report.phase in ("settling", "steady"), report.reason
    compiled = [e for e in report.events if e["kind"] == "compiled"]
    assert all(isinstance(e["cache_hit"], bool) for e in compiled)


def test_where_warnings_are_errors_it_compiles_all_the_same() -> None:
    """In a process of its own, in which Inductor was not imported yet."""
    script = textwrap.dedent(
        """
        import warnings

        from tests.hot import assert_proven, hot
        from tests.models import Small, fit, seeded

        callback = hot(backend="inductor", compile_optimizer=True, store=None)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=DeprecationWarning, module="torch")
            fit(seeded(Small), [callback])
        assert_proven(callback.report)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
