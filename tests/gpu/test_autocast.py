"""On a GPU, too, what a step computes in 32 bit has gradients of 32 bit, with bf16 and with fp16 beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hot import hot
from tests.models import fit, seeded
from tests.swap.test_autocast import Island

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_have_the_precision_of_eagers(precision: str) -> None:
    plain, model = seeded(Island), seeded(Island)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False, on_error="eager")
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision}
    fit(plain, **options)
    fit(model, [callback], **options)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason
    error = (model.gradient - plain.gradient).norm() / plain.gradient.norm()
    # The island's inputs are rounded to 16 bit by both; a product in 16 bit would add as much again.
    assert error < 2e-3, f"{error:.2e}"
