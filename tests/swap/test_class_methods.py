"""A method of a class that somebody replaces in mid-run: compiled code does not go on with the one it had."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.swapped_region import call_module
from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, fit, seeded


class Part:
    def double(self, x: Tensor) -> Tensor:
        return x * 2


class Calls(nn.Module):
    """Calls methods of itself and of another object."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def method(self, x: Tensor) -> Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x + 2

    def forward(self, x: Tensor) -> Tensor:
        return self.part.double(x) + self.method(x) * self.of_class(x)


class Inherits(Calls):
    """Has nothing of its own at first."""


class Linear(nn.Linear):
    """Has nothing of its own at first, and all from torch."""


class Several(nn.Module):
    def __init__(self, kind: type[nn.Module], *args: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind(*args) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def triple(self: object, x: Tensor) -> Tensor:
    return x * 3


def call_twice(self: nn.Module, x: Tensor) -> Tensor:
    return self.forward(x) + self.forward(x)


REPLACED = [
    (Calls, Calls, "__call__", call_twice),
    (Calls, Calls, "_call_impl", call_twice),
    (Inherits, Calls, "__call__", call_twice),
    (Inherits, Inherits, "__call__", call_twice),
    (Calls, nn.Module, "__call__", call_twice),
    (Calls, Calls, "forward", triple),
    (Calls, Calls, "method", triple),
    (Calls, Calls, "of_class", classmethod(triple)),
    (Calls, Part, "double", triple),
    (Inherits, Calls, "forward", triple),
    (Inherits, Inherits, "forward", triple),
    (Inherits, Inherits, "method", triple),
    (Inherits, Inherits, "of_class", classmethod(triple)),
    (Linear, Linear, "forward", triple),
]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("kind", "owner", "name", "other"), REPLACED, ids=lambda each: getattr(each, "__name__", str(each)[:9])
)
def test_what_replaces_it_is_compiled_once_and_what_it_replaced_is_found_again(
    kind: type[nn.Module], owner: type, name: str, other: Any, several: bool
) -> None:
    sizes = (4, 4) if kind is Linear else ()
    module = Several(kind, *sizes) if several else kind(*sizes)
    graphs: list[Any] = []
    compiled = CompiledFunction(
        call_module, lambda graph, _: graphs.append(graph) or graph.forward, dynamic=None, fullgraph=True
    )

    def graphs_after_two_calls() -> int:
        x = torch.arange(8.0).view(2, 4)
        for _ in range(2):
            with compiling_allowed(suppress_errors=False):
                torch.testing.assert_close(compiled.compile(module, x), call_module(module, x))
        return len(graphs)

    assert graphs_after_two_calls() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, other)
        assert graphs_after_two_calls() == 2
    assert graphs_after_two_calls() == 2


def guards_of_methods(module: nn.Module) -> list[str]:
    found: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        context = TracingContext.get().guards_context
        found.extend(each.name for each in context.dynamo_guards if each.create_fn_name() == "CLOSURE_MATCH")
        return graph.forward

    compiled = CompiledFunction(call_module, backend, dynamic=None, fullgraph=True)
    with compiling_allowed(suppress_errors=False):
        compiled.compile(module, torch.ones(2, 4))
    return [name for name in found if "__dict__" in name]


def test_a_class_is_guarded_once_however_many_objects_it_has() -> None:
    """Its forward and its two methods, that of the part, the forward of what holds them, and two calls."""
    module = Several(Calls)
    assert len(guards_of_methods(module)) == 7
    module.parts.extend(Calls() for _ in range(9))
    assert len(guards_of_methods(module)) == 7


class Own(Block):
    """A class that no other test uses."""


class OfOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own(16) for _ in range(3))


class GivesAnotherForward(pl.Callback):
    """In the middle of a run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 3:
            self.patch.setattr(Own, "forward", lambda block, x: x + torch.tanh(block.norm(x)))


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_training_whose_blocks_get_another_forward_goes_on_with_that(scope: str) -> None:
    def trained(*callbacks: pl.Callback) -> Net:
        model = seeded(OfOwn)
        with pytest.MonkeyPatch.context() as patch:
            fit(model, [GivesAnotherForward(patch), *callbacks], max_epochs=8)
        return model

    callback = hot(scope=scope, compile_optimizer=False)
    plain, model = trained(), trained(callback)
    assert_same(plain, model)
    assert_proven(callback.report)
