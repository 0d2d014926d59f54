"""Parts of steps that Python has: recurrent layers, and numbers that are asked for in a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.test_optimizers import Trained
from tests.hot import assert_proven, assert_same, hot
from tests.models import fit, seeded
from tests.swap.test_late_items import ManyLosses
from tests.swap.test_recurrent_layers import Tagger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


class WithoutDropout(Tagger):
    """The library of the GPU draws its masks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent.dropout = 0.0


def test_what_is_around_a_recurrent_layer_is_compiled() -> None:
    plain, model = seeded(WithoutDropout), seeded(WithoutDropout)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-3)
    assert callback.report.graph_breaks == 1


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_numbers_that_are_logged_in_a_loop_are_those_of_this_step(mode: Any) -> None:
    """With CUDA graphs the next step writes where they lie."""
    plain, model = seeded(ManyLosses), seeded(ManyLosses)
    expected = fit(plain, accelerator="gpu").logged_metrics
    callback = hot(backend="inductor", scope="step", compile_optimizer=False, mode=mode)
    found = fit(model, [callback], accelerator="gpu").logged_metrics
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-3)
    assert callback.report.graph_breaks == 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "Adamax"])
def test_updates_of_64_bit_have_all_digits_of_eager(kind: str) -> None:
    wide = type("Wide", (Trained,), {"kind": kind, "settings": {}})
    plain, model = seeded(wide), seeded(wide)
    callback = hot(backend="inductor", scope="step", compile_optimizer=True)
    fit(plain, accelerator="gpu", precision="64-true")
    fit(model, [callback], accelerator="gpu", precision="64-true")
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-10)
