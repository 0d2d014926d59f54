"""Kinds of modules: shared, repeated, hooked, parametrized, stateful, built into torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import SgdNet, TinyBlock


class Stack(SgdNet):
    """The blocks in a row, a loop that subclasses change."""

    def __init__(self, change: Callable[[Stack], Any] = lambda net: None) -> None:
        super().__init__()
        change(self)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.inp(x)))


def changed(change: Callable[[Stack], Any]) -> Callable[[], Stack]:
    return lambda: Stack(change)


class Checkpoints(Stack):
    reentrant = False

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointsReentrant(Checkpoints):
    reentrant = True


class CheckpointsDropout(Checkpoints):
    def __init__(self) -> None:
        super().__init__(
            lambda net: setattr(net, "blocks", nn.ModuleList(TinyBlock(8, 0.3) for _ in range(2)))
        )


class CallsOftenAndAtTimes(Stack):
    """One block three times, the other at every third step only."""

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x) if self.global_step % 3 == 0 else x


class BranchesOnData(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) if float(x.sum()) > 0 else self.blocks[1](x)


class Awkward(nn.Module):
    """Slots, properties and an attribute look-up of its own."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.layer = nn.Linear(8, 8)

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def __getattr__(self, name: str) -> Any:
        return 0.25 if name == "quarter" else super().__getattr__(name)

    def forward(self, x: Tensor, *, keep: bool = False) -> dict[str, Any]:
        return {"x": torch.tanh(self.layer(x)) * self.doubled * self.quarter + x, "keep": keep, "none": None}


class UsesAwkward(Stack):
    def __init__(self) -> None:
        super().__init__(lambda net: setattr(net, "blocks", nn.ModuleList(Awkward() for _ in range(2))))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, keep=True)["x"]
        return x


class Counts(nn.Module):
    """Counts its calls, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x)) + x


class UsesCounts(Stack):
    def __init__(self) -> None:
        super().__init__(lambda net: setattr(net, "blocks", nn.ModuleList(Counts() for _ in range(2))))

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(sum(block.calls for block in self.blocks)))


class LazyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.LazyLinear(8), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


class MadeLate(Stack):
    """Modules made in ``configure_model``; lazy ones get their shapes there by a dry run."""

    lazy = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(LazyBlock() if self.lazy else TinyBlock(8) for _ in range(2))
            if self.lazy:
                self(torch.randn(8, 8))


class MadeLateAndLazy(MadeLate):
    lazy = True


class Hooks(Stack):
    """Hooks of all kinds on the blocks, one of which changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0, 0, 0]
        first, second = self.blocks
        first.register_forward_pre_hook(lambda *_: self.count(0))
        first.register_forward_hook(lambda module, args, out: out * 0.9)
        second.register_full_backward_hook(lambda *_: self.count(1))
        second.register_full_backward_pre_hook(lambda *_: self.count(2))

    def count(self, which: int) -> None:
        self.seen[which] += 1

    def on_train_epoch_end(self) -> None:
        for index, n in enumerate(self.seen):
            self.log(f"seen {index}", float(n))


class GradientHooks(Stack):
    """Hooks on parameters and on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].layer.weight.register_hook(lambda grad: grad * 0.5)
        self.norms: list[float] = []

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        x.register_hook(lambda grad: self.norms.append(float(grad.norm())))
        return x

    def on_train_epoch_end(self) -> None:
        self.log("norms", sum(self.norms))
        self.log("n", float(len(self.norms)))


def share_blocks(net: Stack) -> None:
    net.blocks = nn.ModuleList([net.blocks[0]] * 3)


def share_weights(net: Stack) -> None:
    net.blocks[1].layer.weight = net.blocks[0].layer.weight


def on_layers(wrap: Callable[[nn.Module], Any]) -> Callable[[Stack], None]:
    def change(net: Stack) -> None:
        for block in net.blocks:
            wrap(block.layer)

    return change


def bn_blocks(net: Stack) -> None:
    net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2))


HOOKED = Expect(scope="regions", phase="declined", reason="nothing to compile")

CELLS = [
    Cell(name="checkpointing", model=Checkpoints),
    Cell(name="checkpointing reentrant", model=CheckpointsReentrant),
    Cell(name="checkpointing dropout", model=CheckpointsDropout),
    Cell(
        name="shared blocks", model=changed(share_blocks), regions=Expect(phase="declined", reason="nothing")
    ),
    Cell(name="shared weights", model=changed(share_weights)),
    Cell(name="often and at times", model=CallsOftenAndAtTimes, trainer={"max_epochs": 6}),
    Cell(name="branches on data", model=BranchesOnData),
    Cell(name="awkward", model=UsesAwkward),
    Cell(name="counts its calls", model=UsesCounts),
    Cell(name="made late", model=MadeLate),
    Cell(name="made late and lazy", model=MadeLateAndLazy),
    Cell(name="hooks", model=Hooks, auto=HOOKED, regions=HOOKED),
    Cell(name="gradient hooks", model=GradientHooks),
    Cell(name="BatchNorm", model=changed(bn_blocks)),
    Cell(name="weight_norm", model=changed(on_layers(parametrizations.weight_norm))),
    Cell(name="old weight_norm", model=changed(on_layers(nn.utils.weight_norm))),
    Cell(name="spectral_norm", model=changed(on_layers(parametrizations.spectral_norm))),
    Cell(name="old spectral_norm", model=changed(on_layers(nn.utils.spectral_norm))),
    Cell(name="orthogonal", model=changed(on_layers(parametrizations.orthogonal))),
    Cell(name="pruned", model=changed(on_layers(lambda m: prune.l1_unstructured(m, "weight", 0.3)))),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
