"""Manual optimization, and several optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import SgdNet


class Gan(pl.LightningModule):
    """Two players, two optimizers, toggled; the noise comes from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 24), nn.LeakyReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)
        )
        self.critic = nn.Sequential(
            nn.Linear(8, 24), nn.LeakyReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, optimizers = batch[0], self.optimizers()
        noise = torch.randn(len(real), 4)
        for optimizer, loss_of in zip(optimizers, (self.fool, self.judge), strict=True):
            self.toggle_optimizer(optimizer)
            loss = loss_of(noise, real)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(loss_of.__name__, loss)

    def fool(self, noise: Tensor, real: Tensor) -> Tensor:
        return -self.critic(self.generator(noise)).mean()

    def judge(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return self.critic(fake).pow(2).mean() + (self.critic(real) - 1).pow(2).mean()

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        players = self.generator, self.critic
        optimizers = [torch.optim.SGD(p.parameters(), lr=0.02, momentum=0.5) for p in players]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


class TakesTurns(Gan):
    """The generator moves at every third batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        noise = torch.randn(len(batch[0]), 4)
        turn, loss_of = (first, self.fool) if batch_idx % 3 == 0 else (second, self.judge)
        turn.zero_grad()
        self.manual_backward(loss_of(noise, batch[0]))
        turn.step()


class Penalty(Gan):
    """A gradient penalty: a gradient of a gradient through the critic."""

    def judge(self, noise: Tensor, real: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * self.generator(noise).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return super().judge(noise, real) + (slope.norm(dim=1) - 1).pow(2).mean()


def slope_of(module: nn.Module, x: Tensor, **settings: Any) -> Tensor:
    return torch.autograd.grad(module(x).pow(2).sum(), x, **settings)[0]


TWICE_SETTINGS = {"create" + "_graph": True}


class PenaltyElsewhere(SgdNet):
    """A gradient penalty that the model's source does not show."""

    def loss(self, batch: Any) -> Tensor:
        slope = slope_of(self, batch[0].detach().requires_grad_(), **TWICE_SETTINGS)
        return super().loss(batch) + 0.1 * slope.norm(dim=1).mean()


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Physics:
    """Asks for the slope of a net; a plain object, whose source nobody reads."""

    def residual(self, net: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, **TWICE_SETTINGS)
        return (slope.square().sum(1) - 1).square().mean() + u.square().mean()


class Waves(SgdNet):
    """A net of sines, no backward of which is an operation that is named after one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), Wave(), nn.Linear(16, 16), Wave(), nn.Linear(16, 1))
        self.physics = Physics()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.physics.residual(self.net, batch[0])


class KeepsTheGraph(Gan):
    """Two backward passes through one forward."""

    def judge(self, noise: Tensor, real: Tensor) -> Tensor:
        loss = super().judge(noise, real)
        self.manual_backward(loss * 0.1, retain_graph=True)
        return loss


class PenaltyInTheStep(SgdNet):
    """A gradient penalty under automatic optimization."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).pow(2).sum(), x, create_graph=True)
        return super().loss(batch) + 0.1 * slope.norm(dim=1).mean()


class KeepsTheGraphInBackward(SgdNet):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.5 * loss).backward(retain_graph=True)
        loss.backward()


class Accumulates(SgdNet):
    """Accumulates by itself, and steps inside ``toggled`` closures."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class Closure(Accumulates):
    """Hands a closure to the optimizer, as LBFGS wants it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


REGIONS = Expect(scope="regions")
TWICE = Expect(phase="declined", reason="second derivative")

CELLS = [
    Cell(name="GAN", model=Gan, auto=REGIONS),
    Cell(name="GAN in turns", model=TakesTurns, auto=REGIONS, trainer={"max_epochs": 4}),
    Cell(name="gradient penalty", model=Penalty, auto=TWICE, regions=TWICE),
    Cell(name="penalty in the step", model=PenaltyInTheStep, auto=TWICE, regions=TWICE),
    Cell(name="penalty elsewhere", model=PenaltyElsewhere, auto=TWICE, regions=TWICE),
    Cell(name="waves", model=Waves, auto=TWICE, regions=TWICE),
    Cell(name="graph kept", model=KeepsTheGraph, auto=REGIONS),
    Cell(name="graph kept in backward", model=KeepsTheGraphInBackward),
    Cell(name="own accumulation", model=Accumulates, auto=REGIONS),
    Cell(name="closure", model=Closure, auto=REGIONS),
    Cell(name="compiled optimizers", model=Gan, auto=REGIONS, options={"compile_optimizer": True}),
    Cell(name="bf16-mixed", model=Gan, auto=REGIONS, trainer={"precision": "bf16-mixed"}),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
