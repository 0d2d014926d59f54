"""Activation checkpoints: on a GPU a thread of autograd's own repeats the forward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, fit, seeded
from tests.swap.test_checkpoints import keeps_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keeps_products)
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


class Saving(Net):
    """Each block under a checkpoint, with dropout."""

    settings: dict[str, Any]
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.blocks = torch.nn.ModuleList(self.block(16, 0.3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Broken(Block):
    """A graph break in its middle."""

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.drop(self.down(self.up(y).relu()))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_training_is_the_one_without(name: str, scope: str, backend: str) -> None:
    trained = type(name, (Saving,), {"settings": SETTINGS[name]})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(backend=backend, scope=scope, compile_optimizer=False)
    states = []
    for each, callbacks in ((plain, []), (model, [callback])):
        torch.cuda.manual_seed(5)
        fit(each, callbacks, accelerator="gpu")
        states.append(torch.cuda.get_rng_state())
    assert_proven(callback.report)
    assert callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model, tolerance=1e-2)
    assert torch.equal(*states), "as many random numbers as without"


@pytest.mark.parametrize("name", ["usual", "reentrant"])
def test_blocks_with_a_graph_break(name: str) -> None:
    """What comes after it is a frame of its own, which the backward's thread compiles if it is reentrant."""
    trained = type(name, (Saving,), {"settings": SETTINGS[name], "block": Broken})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(scope="regions", compile_optimizer=False, on_error="eager")
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model, tolerance=1e-3)


@pytest.mark.parametrize("name", ["usual", "reentrant"])
def test_a_compiler_that_fails_in_the_thread_of_the_backward_ends_no_training(name: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no such instruction")
        return graph.forward

    trained = type(name, (Saving,), {"settings": SETTINGS[name], "block": Broken})
    plain, model = seeded(trained), seeded(trained)
    fit(plain, accelerator="gpu")
    callback = hot(backend=backend, scope="regions", compile_optimizer=False, on_error="eager")
    fit(model, [callback], accelerator="gpu")
    assert_same(plain, model, tolerance=1e-3)
