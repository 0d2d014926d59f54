"""Steps that ask for gradients of their own results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


class Adversarial(Net):
    """The gradient of a loss by an activation of the same step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self.inp(x)
        loss = F.cross_entropy(self.after(z), y)
        z = (z + 0.1 * self.gradient(loss, z).sign()).detach()
        return loss + F.cross_entropy(self.after(z), y)

    def after(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        return self.head(z)

    def gradient(self, loss: Tensor, z: Tensor) -> Tensor:
        return torch.autograd.grad(loss, z, retain_graph=True)[0]


class ByKeyword(Adversarial):
    def gradient(self, loss: Tensor, z: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(outputs=[loss], inputs=[z], retain_graph=True)
        return found


class OfTheBatch(Adversarial):
    """By an input: this was right, and is compiled in parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(self(x), y)
        x = (x + 0.1 * self.gradient(loss, x).sign()).detach()
        return F.cross_entropy(self(x), y)


@pytest.mark.parametrize("scope", ["step", "auto", "regions"])
@pytest.mark.parametrize("model_class", [Adversarial, ByKeyword, OfTheBatch])
def test_a_training_is_as_without_the_callback(model_class: type[Net], scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason
