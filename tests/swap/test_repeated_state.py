"""What a block sets while a checkpoint repeats it is as in eager: values of Python's, and buffers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from tests.hot import assert_same, hot
from tests.models import Net, loader, make_trainer, seeded
from tests.swap.test_checkpoints import keeps_products

USUAL: dict[str, Any] = {"use_reentrant": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": USUAL,
    "to its end": {**USUAL, "early_stop": False},
    "selective": {
        **USUAL,
        "context_fn": partial(create_selective_checkpoint_contexts, keeps_products),
    },
    "reentrant": {"use_reentrant": True},
}


class Kind(nn.Module):
    """A layer, and what it keeps from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.n, self.counts, self.last, self.seen = 0, {"n": 0}, torch.zeros(8), [0]

    def state(self) -> list[Any]:
        return [self.mean.clone(), self.n, dict(self.counts), self.last.detach().clone(), list(self.seen)]

    def out(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + x


class CountsFirst(Kind):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.out(x) * (1 + 0.01 * self.n)


class CountsLast(Kind):
    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x) * (1 + 0.01 * self.n)
        self.n += 1
        return y


class CountsInADict(Kind):
    def forward(self, x: Tensor) -> Tensor:
        self.counts["n"] += 1
        return self.out(x)


class CountsInAList(Kind):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] = self.seen[0] + 1
        return self.out(x)


class CountsAfterABreak(Kind):
    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x)
        torch._dynamo.graph_break()
        self.n += 1
        return torch.tanh(y) * (1 + 0.01 * self.n)


calls = 0


class CountsInAGlobal(Kind):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return self.out(x) * (1 + 0.01 * calls)

    def state(self) -> list[Any]:
        return [*super().state(), calls]


def counting() -> Any:
    n = 0

    def scaled(y: Tensor) -> Tensor:
        nonlocal n
        torch._dynamo.graph_break()
        n += 1
        return torch.tanh(y) * (1 + 0.01 * n)

    return scaled


class CountsInAClosure(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = counting()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scaled(self.out(x))
        return y


class KeepsTheLast(Kind):
    def forward(self, x: Tensor) -> Tensor:
        self.last = 0.9 * self.last + 0.1 * x.detach().mean(0)
        return self.out(x + self.last)


class ReplacesABuffer(Kind):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.out(x) * (1 + self.mean)


class AveragesFirst(Kind):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.out(x)


class AveragesLast(Kind):
    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y


class SetsOnly(Kind):
    """The same in each call: as a router that keeps its loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last = y.square().mean(0)
        return torch.tanh(y) + x


EAGER = [CountsFirst, CountsLast, CountsInADict, CountsInAList, CountsAfterABreak, CountsInAGlobal]
EAGER += [CountsInAClosure, KeepsTheLast, ReplacesABuffer]
COMPILED = [AveragesFirst, AveragesLast, SetsOnly]


class Run:
    """Some steps of two blocks, and what is there after them."""

    def __init__(self, kind: type[Kind], settings: dict[str, Any], *, is_compiled: bool) -> None:
        global calls
        calls = 0
        torch.manual_seed(0)
        self.root = nn.Sequential(kind(), kind(), nn.Linear(8, 8))
        self.settings = settings
        self.gate, self.witness = Gate(), Witness("aot_eager")
        region = Region(name="region", kind="group", members=("0", "1"), class_name=kind.__name__)
        self.swapped = SwappedRegion(region, self.gate, self.witness, dynamic=None, fullgraph=False)
        if is_compiled:
            self.swapped.put(self.root)

    def call(self, x: Tensor) -> Tensor:
        for block in list(self.root)[:2]:
            x = checkpoint(block, x, **self.settings)
        y: Tensor = self.root[2](x)
        return y

    def step(self, lane: Lane) -> None:
        self.gate.open(lane)
        x = torch.randn(4, 8, requires_grad=True)
        self.root.zero_grad()
        self.call(x).square().mean().backward()  # type: ignore[no-untyped-call]
        self.gate.close()
        with torch.no_grad():
            for parameter in self.root.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad

    def after(self, lanes: list[Lane]) -> list[Any]:
        for lane in lanes:
            self.step(lane)
        states = [block.state() for block in self.root if isinstance(block, Kind)]
        return [p.detach() for p in self.root.parameters()] + [value for state in states for value in state]


LANES = [Lane.EAGER, Lane.COMPILE, Lane.COMPILE, Lane.REUSE, Lane.EAGER, Lane.REUSE]


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("kind", [*EAGER, *COMPILED])
def test_the_same_as_in_eager(kind: type[Kind], name: str) -> None:
    settings = SETTINGS[name]
    expected = Run(kind, settings, is_compiled=False).after([Lane.EAGER] * len(LANES))
    run = Run(kind, settings, is_compiled=True)
    found = run.after(LANES)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if settings["use_reentrant"] is False:
        reason = run.witness.error_of("region")
        assert reason is None if kind in COMPILED else "sets what it reads" in str(reason)
        if kind not in (CountsAfterABreak, CountsInAClosure):  # what comes before the break is compiled
            assert (run.witness.runs_of("region") > 0) == (kind in COMPILED)


@pytest.mark.parametrize("kind", [CountsFirst, CountsLast])
def test_code_that_was_compiled_without_a_checkpoint(kind: type[Kind]) -> None:
    """It is used where there is none, and only there."""

    class Without(Run):
        is_checkpointed = False

        def call(self, x: Tensor) -> Tensor:
            y: Tensor = super().call(x) if self.is_checkpointed else self.root(x)
            return y

        def after(self, lanes: list[Lane]) -> list[Any]:
            super().after(lanes)
            self.is_checkpointed = True
            return super().after(lanes)

    expected = Without(kind, USUAL, is_compiled=False).after([Lane.EAGER] * 3)
    run = Without(kind, USUAL, is_compiled=True)
    torch.testing.assert_close(run.after([Lane.COMPILE, Lane.COMPILE, Lane.REUSE]), expected, rtol=0, atol=0)
    assert run.witness.runs_of("region") == 6


class Averages(Net):
    """Blocks that change a buffer after all else; with the whole step eager runs as it was captured, once."""

    settings = USUAL

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.averaging = nn.ModuleList(AveragesLast() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for block in self.averaging:
            x = checkpoint(block, x, **self.settings)
        return nn.functional.cross_entropy(self(x), y)


class AveragesToItsEnd(Averages):
    settings = SETTINGS["to its end"]


@pytest.mark.parametrize("kind", [Averages, AveragesToItsEnd])
def test_a_captured_step_changes_a_buffer_as_often_as_eager(kind: type[Averages]) -> None:
    plain, model = seeded(kind), seeded(kind)
    make_trainer(max_epochs=1).fit(plain, loader(40))
    make_trainer([hot(scope="step", on_error="eager")], max_epochs=1).fit(model, loader(40))
    assert_same(plain, model)


@pytest.mark.parametrize("name", ["selective"])
def test_torch_warns_of_no_hooks_of_ours(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        Run(SetsOnly, SETTINGS[name], is_compiled=True).after(LANES)
