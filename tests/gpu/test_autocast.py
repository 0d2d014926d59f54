"""On a GPU, too, what a step computes in 32 bit has gradients of 32 bit, beside bf16 and fp16."""

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
    # Not by Inductor: it rounds to 16 bit in fewer places than eager does, which is another question.
    callback = hot(backend="aot_eager", scope="step", compile_optimizer=False, on_error="eager")
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision}
    fit(plain, **options)
    fit(model, [callback], **options)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason
    torch.testing.assert_close(model.gradient, plain.gradient, rtol=1e-5, atol=1e-7)
