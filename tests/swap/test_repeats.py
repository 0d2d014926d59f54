"""Checkpoints whose backward comes in a later step: what they repeat runs as it ran in the forward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.process.saved_tensors import hooks_in_use
from lightning_hotcompile.swap.repeats import checkpoint_of
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, loader, make_trainer, seeded

USUAL: dict[str, Any] = {"use_reentrant": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": USUAL,
    "to its end": {**USUAL, "early_stop": False},
    "reentrant": {"use_reentrant": True},
}
EAGER, COMPILE, REUSE = Lane.EAGER, Lane.COMPILE, Lane.REUSE
CASES = [
    *(("usual", first, later, True) for first, later in itertools.permutations(Lane, 2)),
    ("usual", COMPILE, EAGER, False),
    ("usual", COMPILE, REUSE, False),
    ("usual", EAGER, COMPILE, False),
    ("usual", REUSE, COMPILE, False),
    ("to its end", COMPILE, EAGER, True),
    ("to its end", REUSE, COMPILE, True),
    ("to its end", EAGER, REUSE, True),
    ("to its end", COMPILE, REUSE, False),
    ("reentrant", COMPILE, EAGER, True),
    ("reentrant", EAGER, COMPILE, True),
    ("reentrant", REUSE, REUSE, True),
    ("reentrant", REUSE, COMPILE, False),
]
"""Settings, the lanes of forward and backward, and whether there is compiled code before them."""


class Setup:
    """Blocks under a checkpoint each, one region, and code for it that is compiled already."""

    def __init__(self, settings: dict[str, Any], *, is_compiled: bool = True) -> None:
        torch.manual_seed(0)
        self.settings = settings
        self.root = nn.Sequential(*(Block(8, dropout=0.3) for _ in range(3)))
        region = Region(name="region", kind="group", members=("0", "1", "2"), class_name="Block")
        self.gate, self.witness = Gate(), Witness("aot_eager")
        self.swapped = SwappedRegion(region, self.gate, self.witness, dynamic=None, fullgraph=False)
        self.swapped.put(self.root)
        if is_compiled:
            self.backward(Lane.COMPILE, self.forward(Lane.COMPILE))

    @property
    def runs(self) -> int:
        return self.witness.watch.total_runs

    def forward(self, lane: Lane, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        self.gate.open(lane)
        for block in self.root:
            x = checkpoint(block, x, **self.settings)
        self.gate.close()
        return x.square().sum()

    def backward(self, lane: Lane, loss: Tensor) -> list[Tensor]:
        self.root.zero_grad()
        self.gate.open(lane)
        loss.backward()  # type: ignore[no-untyped-call]
        self.gate.close()
        return [p.grad.clone() for p in self.root.parameters() if p.grad is not None]


def expected(settings: dict[str, Any], seed: int = 0) -> list[Tensor]:
    setup = Setup(settings, is_compiled=False)
    return setup.backward(Lane.EAGER, setup.forward(Lane.EAGER, seed))


@pytest.mark.parametrize(("name", "first", "later", "is_compiled"), CASES)
def test_a_backward_on_any_lane(name: str, first: Lane, later: Lane, is_compiled: bool) -> None:
    settings = SETTINGS[name]
    setup = Setup(settings, is_compiled=is_compiled)
    before, loss = setup.runs, setup.forward(first)
    ran = setup.runs > before
    torch.testing.assert_close(setup.backward(later, loss), expected(settings))
    if settings["use_reentrant"] is False:
        assert setup.runs - before == (6 if ran else 0)


@pytest.mark.parametrize("settings", [USUAL, SETTINGS["to its end"]], ids=["usual", "to its end"])
@pytest.mark.parametrize("lane", [Lane.COMPILE, Lane.REUSE])
def test_the_backward_of_the_same_step_is_compiled(settings: dict[str, Any], lane: Lane) -> None:
    setup = Setup(settings)
    before = setup.runs
    setup.backward(lane, setup.forward(lane))
    assert setup.runs - before == 6
    assert len(setup.witness.graphs) == 1


@pytest.mark.parametrize("lane", list(Lane))
def test_a_backward_after_the_region_is_taken_out(lane: Lane) -> None:
    setup = Setup(USUAL)
    loss = setup.forward(lane)
    setup.swapped.take_out()
    torch.testing.assert_close(setup.backward(Lane.EAGER, loss), expected(USUAL))
    assert not setup.swapped.is_in_place
    assert all("_compiled_call_impl" not in vars(block) for block in setup.root)


def test_a_backward_after_the_region_has_failed() -> None:
    setup = Setup(USUAL)
    loss = setup.forward(Lane.REUSE)
    setup.swapped.error = "of another batch"
    torch.testing.assert_close(setup.backward(Lane.REUSE, loss), expected(USUAL))


def test_one_backward_of_forwards_on_several_lanes() -> None:
    setup = Setup(USUAL)
    losses = [setup.forward(lane, seed) for seed, lane in enumerate(Lane)]
    found = setup.backward(Lane.REUSE, sum(losses, torch.zeros(())))
    each = zip(*(expected(USUAL, seed) for seed in range(len(losses))), strict=True)
    torch.testing.assert_close(found, [sum(gradients, torch.zeros(())) for gradients in each])


def test_a_forward_that_no_code_fitted_is_repeated_eagerly_once_there_is_some() -> None:
    setup = Setup(USUAL, is_compiled=False)
    loss = setup.forward(Lane.REUSE)
    setup.backward(Lane.COMPILE, setup.forward(Lane.COMPILE))
    torch.testing.assert_close(setup.backward(Lane.REUSE, loss), expected(USUAL))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("lane", [Lane.COMPILE, Lane.REUSE])
def test_a_mode_that_sees_the_forward_alone(lane: Lane, is_compiled: bool) -> None:
    setup = Setup(USUAL, is_compiled=is_compiled)
    with FlopCounterMode(display=False):
        loss = setup.forward(lane)
    torch.testing.assert_close(setup.backward(lane, loss), expected(USUAL))


@pytest.mark.parametrize("lane", [Lane.COMPILE, Lane.REUSE])
def test_a_mode_that_sees_the_backward_alone(lane: Lane) -> None:
    setup = Setup(USUAL)
    loss = setup.forward(lane)
    with FlopCounterMode(display=False):
        found = setup.backward(lane, loss)
    torch.testing.assert_close(found, expected(USUAL))


@pytest.mark.parametrize("fails_after", [0, 1])
def test_calls_in_one_checkpoint_are_told_apart(fails_after: int) -> None:
    """A region may be given up in the middle of one, after calls that ran compiled."""

    def gradients(setup: Setup, lane: Lane) -> list[Tensor]:
        def row(x: Tensor) -> Tensor:
            for i, block in enumerate(setup.root):
                x = block(x)
                if i == fails_after and lane is Lane.REUSE:
                    setup.swapped.error = "no time is left for another variant"
            return x

        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        setup.gate.open(lane)
        loss = checkpoint(row, x, **USUAL).square().sum()
        setup.gate.close()
        return setup.backward(lane, loss)

    setup = Setup(USUAL)
    before = setup.runs
    found = gradients(setup, Lane.REUSE)
    torch.testing.assert_close(found, gradients(Setup(USUAL, is_compiled=False), Lane.EAGER))
    assert setup.runs - before == 2 * (fails_after + 1)


def test_hooks_of_others_are_no_checkpoints() -> None:
    with torch.autograd.graph.save_on_cpu():
        hooks = hooks_in_use()
    assert hooks is not None
    assert checkpoint_of(hooks) is None
    assert checkpoint_of((lambda x: x, lambda x: x)) is None


class Late(Net):
    """Checkpointed blocks; the losses of several batches have one backward."""

    every = 4
    settings = USUAL

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.automatic_optimization = False
        self.pending: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        y: Tensor = self.head(x)
        return y

    def total(self, batch: Any) -> Tensor | None:
        self.pending.append(self.loss(batch))
        if len(self.pending) < self.every:
            return None
        total, self.pending = torch.stack(self.pending).sum(), []
        return total

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (total := self.total(batch)) is not None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(total)
            optimizer.step()


class LateInThree(Late):
    every = 3


class LateToItsEnd(Late):
    settings = SETTINGS["to its end"]


class LateReentrant(Late):
    settings = SETTINGS["reentrant"]


class LateAutomatic(Late):
    """A batch without a loss is skipped by Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.total(batch)


def trained(kind: type[Late], callbacks: list[Any], **options: Any) -> Late:
    model = seeded(kind)
    torch.manual_seed(5)
    settings = {"max_epochs": 4, "val_check_interval": 3, **options}
    make_trainer(callbacks, **settings).fit(model, loader(), loader(16))
    return model


@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`", "ignore:None of the inputs have")
@pytest.mark.parametrize(
    ("kind", "threshold"),
    [(Late, 3), (Late, 4), (LateInThree, 5), (LateToItsEnd, 4), (LateReentrant, 4), (LateAutomatic, 3)],
)
def test_a_training_whose_losses_have_a_late_backward(kind: type[Late], threshold: int) -> None:
    """The first compiled step is one with a backward, one before it, or one after it."""
    callback = hot(scope="regions", threshold=threshold)
    assert_same(trained(kind, []), trained(kind, [callback]))
    assert callback.report.phase == "steady"
    assert_proven(callback.report)


@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ({"scope": "module"}, "steady"),
        ({"scope": "auto"}, "steady"),
        ({"scope": "regions", "min_speedup": 99.0}, "reverted"),
        ({"scope": "regions", "stages": ("train", "validate")}, "steady"),
    ],
    ids=["module", "auto", "reverted", "validate too"],
)
def test_other_plans_and_other_ends(options: dict[str, Any], phase: str) -> None:
    callback = hot(**options)
    assert_same(trained(Late, []), trained(Late, [callback]))
    assert callback.report.phase == phase


class AtTheEnd(Late):
    """The last losses have their backward when nothing is in place any longer."""

    every = 5

    def on_train_end(self) -> None:
        assert self.pending
        self.zero_grad()
        torch.stack(self.pending).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def test_a_backward_at_the_end_of_the_training() -> None:
    callback = hot(scope="regions")
    assert_same(trained(AtTheEnd, []), trained(AtTheEnd, [callback]))
    assert_proven(callback.report)
