"""Optimizers, schedulers, and the hooks around the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import AdamNet, SgdNet


def with_optimizers(make: Callable[[Any], Any], base: type[AdamNet] = AdamNet) -> type[AdamNet]:
    """A model whose ``configure_optimizers`` is this function."""
    return type("With", (base,), {"configure_optimizers": make})


def scheduled(make: Callable[[Any], Any], **config: Any) -> type[AdamNet]:
    """A model with SGD and a scheduler of its own, per step unless told otherwise."""

    def configure(self: AdamNet) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), "interval": "step", **config},
        }

    return with_optimizers(configure)


def two_schedulers(self: AdamNet) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
    schedules = torch.optim.lr_scheduler
    by_step = {"scheduler": schedules.LambdaLR(optimizer, lambda n: 0.99**n), "interval": "step"}
    return [optimizer], [by_step, {"scheduler": schedules.ExponentialLR(optimizer, 0.9), "interval": "epoch"}]


def in_groups(self: AdamNet) -> Any:
    """One group for each parameter, with other rates and decays."""
    groups = [
        {"params": [p], "lr": 0.01 * (i % 3 + 1), "weight_decay": 0.1 * (p.ndim > 1)}
        for i, p in enumerate(self.parameters())
    ]
    return torch.optim.AdamW(groups)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own, which keeps Python numbers in its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    p.sub_(torch.tanh(p.grad) * group["lr"] / state["n"] ** 0.5)
        return loss


class Warm(torch.optim.SGD):
    """A subclass that changes its rate in ``step``."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = min(0.05, group["lr"] * 1.1)
        return super().step(closure)


class Skips(SgdNet):
    """Steps at every second batch only, but runs each closure."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class WarmsUp(SgdNet):
    """The usual recipe for a warm-up: the rate is set in ``optimizer_step``."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        scale = min(1.0, (self.trainer.global_step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = scale * 0.05


class ZeroesInPlace(SgdNet):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class StepsTheScheduler(AdamNet):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


class NoisyGradients(SgdNet):
    """Changes gradients, as differential privacy does: random numbers outside of the step."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


class OwnBackward(SgdNet):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class SparseTable(AdamNet):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x.abs() * 3).long().clamp(max=9)).mean(1)
        return self.head(self.blocks[1](self.blocks[0](x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StepHooks(SgdNet):
    """Hooks on the optimizer itself."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.seen = [0, 0]
        optimizer.register_step_pre_hook(lambda *_: self.count(0))
        optimizer.register_step_post_hook(lambda *_: self.count(1))
        return optimizer

    def count(self, which: int) -> None:
        self.seen[which] += 1

    def on_train_epoch_end(self) -> None:
        self.log("pre", float(self.seen[0]))
        self.log("post", float(self.seen[1]))


class Freezes(SgdNet):
    """Parameters that are frozen and given back from epoch to epoch."""

    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch % 2 == 1)
        self.blocks[1].train(self.current_epoch % 2 == 0)


class NoOptimizer(AdamNet):
    def configure_optimizers(self) -> None:
        return None


def torch_optimizer(name: str, **settings: Any) -> type[AdamNet]:
    return with_optimizers(lambda self: getattr(torch.optim, name)(self.parameters(), **settings))


PLATEAU = {"monitor": "loss", "interval": "step", "strict": True}
SCHEDULES = torch.optim.lr_scheduler

CELLS = [
    Cell(name="cosine", model=scheduled(lambda o: SCHEDULES.CosineAnnealingLR(o, 36))),
    Cell(name="lambda", model=scheduled(lambda o: SCHEDULES.LambdaLR(o, lambda n: min(1.0, n / 9)))),
    Cell(
        name="one cycle",  # moves the momentum, which would be a constant of the optimizer's graph
        model=scheduled(lambda o: SCHEDULES.OneCycleLR(o, 0.1, total_steps=40)),
        auto=Expect(scope="step", unproven=("optimizer 0",)),
    ),
    Cell(
        name="plateau",
        model=scheduled(lambda o: SCHEDULES.ReduceLROnPlateau(o, patience=1, cooldown=1), **PLATEAU),
    ),
    Cell(
        name="plateau by epoch",
        model=scheduled(lambda o: SCHEDULES.ReduceLROnPlateau(o), monitor="loss", interval="epoch"),
    ),
    Cell(name="two schedulers", model=with_optimizers(two_schedulers)),
    Cell(name="scheduler of one's own", model=StepsTheScheduler),
    Cell(name="a group for each parameter", model=with_optimizers(in_groups)),
    Cell(name="Adagrad", model=torch_optimizer("Adagrad", lr=0.05)),
    Cell(name="RMSprop", model=torch_optimizer("RMSprop", lr=0.001, momentum=0.9, centered=True)),
    Cell(name="NAdam", model=torch_optimizer("NAdam", lr=0.005)),
    Cell(name="amsgrad", model=torch_optimizer("Adam", lr=0.005, amsgrad=True, weight_decay=0.1)),
    Cell(name="not foreach", model=torch_optimizer("Adam", lr=0.005, foreach=False)),
    Cell(name="fused", model=torch_optimizer("AdamW", lr=0.005, fused=True)),
    Cell(name="nesterov", model=torch_optimizer("SGD", lr=0.02, momentum=0.9, nesterov=True)),
    Cell(name="rate as a tensor", model=torch_optimizer("Adam", lr=torch.tensor(0.005))),
    Cell(name="LBFGS", model=torch_optimizer("LBFGS", lr=0.1, max_iter=3)),
    Cell(name="own optimizer", model=with_optimizers(lambda self: SignDescent(self.parameters(), 0.05))),
    Cell(name="own subclass of SGD", model=with_optimizers(lambda self: Warm(self.parameters(), 0.001))),
    Cell(name="no optimizer", model=NoOptimizer),
    Cell(
        name="sparse gradients",
        model=SparseTable,
        options={"on_error": "eager"},  # no optimizer tells beforehand that gradients will be sparse
        auto=Expect(scope="step", unproven=("optimizer 0",)),
    ),
    Cell(name="optimizer_step that skips", model=Skips),
    Cell(name="optimizer_step that warms up", model=WarmsUp),
    Cell(name="zero_grad in place", model=ZeroesInPlace),
    Cell(name="noise on gradients", model=NoisyGradients),
    Cell(name="own backward", model=OwnBackward),
    Cell(name="hooks on the optimizer", model=StepHooks),
    Cell(name="freezing", model=Freezes, trainer={"max_epochs": 6}),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
