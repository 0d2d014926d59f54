"""On a GPU Inductor has several kernels to choose from: a mode that times them is tried in long runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_hotcompile import HotCompile
from lightning_hotcompile.run.round import CLEARLY_BETTER
from tests.hot import assert_same
from tests.models import Net, fit, seeded

TUNED = "max-autotune-no-cudagraphs"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def test_a_mode_is_tried_and_the_best_is_kept(cheap_compiles: None, tmp_path: Path) -> None:
    gpu = {"accelerator": "gpu", "max_steps": 1500, "max_epochs": -1}
    plain, model = seeded(Net), seeded(Net)
    callback = HotCompile(threshold=3, prewarm=False, store=str(tmp_path / "store"), on_error="raise")
    fit(plain, **gpu)
    fit(model, [callback], **gpu)
    report = callback.report
    assert report.parity_error is not None, report.parity
    assert "NOT right" not in report.parity
    if max(report.tried.get("step", 0.0), report.tried.get("module", 0.0)) > 1:
        assert any(name.endswith(TUNED) for name in report.tried)
        left = [event["left"] for event in report.events if event["kind"] == "scopes_raced"]
        best = max(speedup for scope, speedup in report.tried.items() if scope not in left)
        assert report.tried[report.scope] >= best / CLEARLY_BETTER
    assert_same(plain, model, tolerance=1e-2)
