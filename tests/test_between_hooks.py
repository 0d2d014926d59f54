"""What other callbacks and the module do in their hooks is no part of the step: it runs eagerly."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile import HotCompile
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

HOOKS = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
]

AROUND = ["on_train_batch_start", "on_train_batch_end"]


def looks_at_a_block(hook: str, look: Any, base: type[Any] = pl.Callback) -> Any:
    """A class whose hook does something with the model in each step."""

    def method(self: Any, *arguments: Any, **_: Any) -> None:
        module = self if isinstance(self, pl.LightningModule) else arguments[1]
        if module.training:
            look(module)

    return type("Looks", (base,), {hook: method})


def train(hook: str, look: Any, *, first: bool, scope: str, **options: Any) -> HotCompile:
    """A training with another callback before or after ours; its weights are those without ours."""
    found = []
    for callback in (None, hot(scope=scope, compile_optimizer=False, **options)):
        model, other = seeded(Net, n_block=2), looks_at_a_block(hook, look)()
        ours = [] if callback is None else [callback]
        fit(model, [other, *ours] if first else [*ours, other])
        found.append(model)
    assert_same(*found)
    assert callback is not None
    return callback


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_other_shapes_in_a_hook_make_no_recompile(hook: str, first: bool) -> None:
    sizes = iter(range(1, 10_000))

    def look(module: Any) -> None:
        with torch.no_grad():
            module(torch.ones(1 + next(sizes) % 7, 8))

    callback = train(hook, look, first=first, scope="regions")
    assert callback.report.phase == "steady"
    assert_proven(callback.report)
    assert callback.report.recompiles == 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("scope", ["regions", "module", "step"])
@pytest.mark.parametrize("hook", AROUND)
def test_a_block_can_be_traced_in_a_hook(hook: str, scope: str, first: bool) -> None:
    traced = []

    def look(module: Any) -> None:
        with torch.no_grad():
            traced.append(torch.jit.trace(module.blocks[0], torch.ones(8, 16)))

    callback = train(hook, look, first=first, scope=scope)
    assert callback.report.phase == "steady"
    assert len(traced) == 2 * callback.report.steps
    assert_proven(callback.report)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_modules_own_hooks_run_eagerly_too(hook: str) -> None:
    def look(module: Any) -> None:
        with torch.no_grad():
            module(torch.ones(5, 8))

    found = []
    for callback in (None, hot(scope="regions")):
        model = seeded(looks_at_a_block(hook, look, Net), n_block=2)
        fit(model, [] if callback is None else [callback])
        found.append(model)
    assert_same(*found)
    assert callback is not None
    assert (callback.report.phase, callback.report.recompiles) == ("steady", 0)


def test_a_step_that_a_hook_calls_is_eager() -> None:
    logged: list[bool] = []

    def look(module: Any) -> None:
        loss = module.training_step((torch.ones(2, 8), torch.zeros(2, dtype=torch.long)), 0)
        logged.append(isinstance(loss, Tensor))

    class Plain(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(Plain), [looks_at_a_block("on_train_batch_end", look)(), callback])
    assert (callback.report.phase, callback.report.recompiles) == ("steady", 0)
    assert all(logged)
    assert len(logged) == callback.report.steps


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_that_a_hook_starts_repeats_blocks_as_they_ran(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

        def on_before_backward(self, loss: Tensor) -> None:
            loss.backward(retain_graph=True)
            self.zero_grad()

    found = []
    for callback in (None, hot(scope="regions")):
        model = seeded(Checkpointed, n_block=2)
        fit(model, [] if callback is None else [callback])
        found.append(model)
    assert_same(*found)
    assert callback is not None
    assert callback.report.phase == "steady"
    assert callback.report.regions[0].proven
