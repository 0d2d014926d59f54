"""Steps that ask for gradients of their own results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
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


class InAMethod(Adversarial):
    """A method that is compiled by itself has made both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, z = self.both(batch)
        return loss * (1 + self.gradient(loss, z).norm())

    def both(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        z = self.inp(x)
        return F.cross_entropy(self.after(z), y), z


class AfterABreak(InAMethod):
    """The loss and the activation are there before the graph in which it asks."""

    def both(self, batch: Any) -> tuple[Tensor, Tensor]:
        found = super().both(batch)
        torch._dynamo.graph_break()
        return found


class Kept(InAMethod):
    """For after the backward, as where activations are logged."""

    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch._dynamo.graph_break()
        loss, self.z = self.both(batch)
        self.look()
        return loss

    @torch.compiler.disable
    def look(self) -> None:
        self.z.retain_grad()

    def on_after_backward(self) -> None:
        assert self.z.grad is not None
        with torch.no_grad():
            self.head.bias.grad += self.z.grad.norm()


class Hooked(Kept):
    @torch.compiler.disable
    def look(self) -> None:
        self.z.register_hook(lambda gradient: 0.5 * gradient)

    def on_after_backward(self) -> None:
        """Nothing was kept."""


@pytest.mark.parametrize("model_class", [InAMethod, AfterABreak, Kept, Hooked])
def test_gradients_by_what_another_graph_has_made(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain, max_epochs=1)
    fit(model, [callback], max_epochs=1)
    assert_same(plain, model)
    assert "the gradient of an output is asked for" in callback.report.to_text().replace("\n ", "")


@pytest.mark.parametrize("scope", ["step", "auto", "regions"])
@pytest.mark.parametrize("model_class", [Adversarial, ByKeyword, OfTheBatch])
def test_a_training_is_as_without_the_callback(model_class: type[Net], scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason
    assert "Error" not in callback.report.to_text(), "a reason is a sentence"


class Balanced(Net):
    """Weighs one loss by how long the gradients of both are in the last layer, as VQGAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self(x)
        errors = F.cross_entropy(scores, y, reduction="none") / self.critic.bias.exp()
        error, opinion = torch.sum(errors) / len(x), self.critic(scores).mean()
        share = self.length(error) / (self.length(opinion) + 1e-4)
        return error + 0.1 * share.detach() * opinion

    def length(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.head.weight, retain_graph=True)[0].norm()


@pytest.mark.parametrize("scope", ["step", "module"])
def test_losses_weighed_by_their_gradients_are_compiled(scope: str) -> None:
    plain, model = seeded(Balanced), seeded(Balanced)
    callback = hot(scope=scope, compile_optimizer=False)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
