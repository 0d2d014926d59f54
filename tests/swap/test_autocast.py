"""Lightning's backward runs outside of the autocast around the step, and so does that of compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


class Island(Net):
    """A part of the step in 32 bit, as routers and losses are."""

    def __init__(self) -> None:
        super().__init__(width=32, n_block=1)
        self.router = Router()
        self.gradient: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.router(self(x).repeat(1, 11)[:, :32])
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # so that all steps begin alike

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.router.weight.grad is not None
        self.gradient = self.router.weight.grad.clone()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.scale(x))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight)[:, :3]


class ByHand(Island):
    """Manual optimization: the backward runs within Lightning's autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("model_class", "scope"), [(Island, "step"), (Island, "module"), (Island, "auto"), (ByHand, "module")]
)
def test_gradients_have_the_precision_of_eagers(model_class: type[Island], scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    fit(plain, **options)
    fit(model, [callback], **options)
    assert_same(plain, model)
    torch.testing.assert_close(model.gradient, plain.gradient, rtol=1e-5, atol=1e-7)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason
    assert "NOT" not in callback.report.parity
