"""Activation checkpointing with dropout: a captured graph that runs eagerly repeats its forward as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpointed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_hotcompile import Report
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.parity.captured import copy_of, eager_forward
from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, loader, make_trainer, seeded


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, keeps_products),
    },
}


def trained_once(block: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Loss, gradients and the next random number."""
    torch.manual_seed(3)
    x = torch.ones(4, 16, requires_grad=True)
    block.zero_grad()
    loss = call(x).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in (x, *block.parameters()) if p.grad is not None]
    return [loss.detach(), *gradients, torch.rand(1)]


def nested(block: nn.Module, x: Tensor, **settings: Any) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, **settings)
        return torch.dropout(y, 0.3, train=True)

    outer: Tensor = checkpoint(inner, x, use_reentrant=False)
    return outer


def plain(block: nn.Module, x: Tensor, **settings: Any) -> Tensor:
    y: Tensor = checkpoint(block, x, **settings)
    return y * 2


def under_autocast(block: nn.Module, x: Tensor, **settings: Any) -> Tensor:
    def body(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = block(x)
        return y

    y: Tensor = checkpoint(body, x, **settings)
    return y


def depth_of_autocast() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def autocast_is_left() -> Iterator[None]:
    before = depth_of_autocast()
    yield
    assert depth_of_autocast() == before


@pytest.mark.parametrize("call", [plain, nested, under_autocast], ids=["plain", "nested", "autocast"])
@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))
def test_a_captured_graph_run_eagerly_repeats_the_same_forward(
    settings: dict[str, Any], call: Callable[..., Tensor]
) -> None:
    block = Block(16, dropout=0.4)
    given = functools.partial(call, block, **settings)
    expected = trained_once(block, given)
    captured: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return eager_forward(copy_of(graph))

    found = trained_once(block, torch.compile(given, backend=backend))
    assert captured
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


def test_a_graph_without_a_checkpoint_is_run_as_it_is() -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    assert eager_forward(graph) == graph.forward


def test_a_step_whose_graphs_are_only_collected_is_that_of_eager() -> None:
    """The step in which a child process is given its graphs."""
    block = Block(16, dropout=0.4)
    given = functools.partial(plain, block, use_reentrant=False)
    expected, collected = trained_once(block, given), []
    witness = Witness("aot_eager")
    witness.collect = lambda region, graph, inputs: collected.append(region)
    found = trained_once(block, torch.compile(given, backend=witness.backend_for("one")))
    assert collected == ["one"]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


class Saving(Net):
    """Blocks under checkpoints, with dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_training_is_the_one_without(scope: str) -> None:
    arms = []
    callback = hot(scope=scope)
    for callbacks in ([], [callback]):
        model = seeded(Saving)
        torch.manual_seed(5)
        make_trainer(callbacks=callbacks, max_steps=60, max_epochs=-1).fit(model, loader())
        arms.append((model, torch.get_rng_state()))
    assert callback.report.phase == "steady"
    assert "is NOT right" not in callback.report.parity
    assert "own noise" not in callback.report.parity, "its numbers are eager's"
    assert_same(arms[0][0], arms[1][0])
    assert torch.equal(arms[0][1], arms[1][1])


class NormedBlocks(Net):
    """Blocks with buffers that a forward changes, each in a checkpoint."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.normed = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for block in self.normed:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self(x), y)


def assert_only_blocks_are_compiled(report: Report) -> None:
    """A block alone is; of a step with the checkpoint in it the backward needs what it writes to."""
    if report.scope == "regions":
        assert_proven(report)
    else:
        step = next(r for r in report.regions if r.kind == "step")
        assert (step.proven, step.runs) == (False, 0)
        assert "training_step is NOT right: writes to an input that its backward needs" in report.parity


@pytest.mark.parametrize("scope", ["auto", "step", "regions"])
def test_buffers_that_a_checkpoint_changes(scope: str) -> None:
    """Eager counts each batch twice, in the forward that is repeated too."""
    callback = hot(scope=scope)
    plain, model = seeded(NormedBlocks), seeded(NormedBlocks)
    make_trainer(max_epochs=1).fit(plain, loader())
    make_trainer([callback], max_epochs=1).fit(model, loader())
    assert_same(plain, model)
    assert_only_blocks_are_compiled(callback.report)


class ReentrantOnTheBatch(NormedBlocks):
    """No input of the checkpoint needs a gradient: eager's leaves out those of its parameters (and warns)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        seen = x
        for block in self.normed:
            seen = checkpoint(block, seen, use_reentrant=True)
        return nn.functional.cross_entropy(self(x + seen), y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_parameters_that_eager_gives_no_gradient(scope: str) -> None:
    callback = hot(scope=scope)
    plain, model = seeded(ReentrantOnTheBatch), seeded(ReentrantOnTheBatch)
    make_trainer(max_epochs=1).fit(plain, loader())
    make_trainer([callback], max_epochs=1).fit(model, loader())
    assert_same(plain, model)
    assert_only_blocks_are_compiled(callback.report)


class ByHooks(Net):
    """Each block is under a checkpoint that hooks of its own open and close, as next to FSDP2."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        for block in self.blocks:
            checkpointed(block)


@pytest.mark.parametrize("scope", ["step", "regions", "module"])
def test_checkpoints_that_hooks_open(scope: str) -> None:
    """What such a checkpoint repeats is the module without them: no region is called as in its forward."""
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    plain, model = seeded(ByHooks), seeded(ByHooks)
    for each, callbacks in ((plain, []), (model, [callback])):
        torch.manual_seed(5)
        make_trainer(callbacks, max_epochs=1).fit(each, loader())
    assert_same(plain, model)
    assert "a hook of a module opens an activation checkpoint" in callback.report.to_text()
