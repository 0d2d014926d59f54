"""What was compiled for a training that is over goes with it, though Dynamo would keep it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_hotcompile.swap.compiled_function import _HAS_BUCKETS, CompiledFunction
from lightning_hotcompile.swap.letting_go import forget_gone_functions
from tests.hot import STEP, assert_proven, hot
from tests.models import Block, Small, fit, seeded

breaks_need_isolation = pytest.mark.skipif(
    not _HAS_BUCKETS, reason="this torch does not tell for which function it has compiled another one"
)


class Graphs:
    """A backend that runs graphs as they are, and knows which of them are still in memory."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[GraphModule]] = []

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self._made.append(weakref.ref(graph))
        return graph.forward

    @property
    def made(self) -> int:
        return len(self._made)

    @property
    def left(self) -> int:
        return sum(graph() is not None for graph in self._made)


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> Iterator[None]:
    settle()
    yield
    settle()


def settle() -> None:
    for _ in range(3):  # what one round lets go of may be in rings that the next one finds
        gc.collect()
        forget_gone_functions()


def compiled(function: Callable[..., Any], graphs: Graphs) -> CompiledFunction:
    return CompiledFunction(function, graphs, dynamic=None, fullgraph=False)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        torch._dynamo.graph_break()
        return x + 1


class BlockThatBreaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class WithBreaks(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = BlockThatBreaks(16)


X = torch.ones(2, 3)


class TestFunctions:
    def test_its_graph_is_gone_with_it(self) -> None:
        graphs = Graphs()
        function = compiled(lambda x: x + 1, graphs)
        function(X)
        settle()
        assert (graphs.made, graphs.left) == (1, 1)
        del function
        settle()
        assert graphs.left == 0

    @breaks_need_isolation
    def test_those_after_a_break_in_what_it_calls_are_gone_as_well(self) -> None:
        graphs, module = Graphs(), Breaks()
        compiled(lambda x: module(x) * 2, graphs)(X)
        settle()
        assert (graphs.made, graphs.left) == (3, 0)

    def test_another_function_that_calls_the_same_keeps_its_own(self) -> None:
        graphs, others, module = Graphs(), Graphs(), Breaks()
        gone, stays = compiled(lambda x: module(x) * 2, graphs), compiled(lambda x: module(x) * 3, others)
        expected = stays(X)
        gone(X)
        made = others.made
        del gone
        settle()
        assert torch.equal(stays.reuse(X), expected)
        assert torch.equal(stays(X), expected)
        assert (others.made, others.left) == (made, made)

    def test_what_the_user_compiles_stays(self) -> None:
        graphs, own, module = Graphs(), Graphs(), Breaks()
        users = torch.compile(module, backend=own)
        expected = users(X)
        made = own.made
        compiled(lambda x: module(x) * 2, graphs)(X)
        settle()
        assert torch.equal(users(X), expected)
        assert (own.made, own.left) == (made, made)

    def test_code_that_a_checkpoint_may_repeat_stays(self) -> None:
        graphs, module = Graphs(), Breaks()
        function = compiled(lambda x: module(x) * 2, graphs)
        expected = function(X)
        again = function.reuse
        del function
        settle()
        assert torch.equal(again(X), expected)
        assert graphs.left == graphs.made == 3
        del again
        settle()
        assert graphs.left == 0 or not _HAS_BUCKETS

    def test_a_module_that_dies_later_finds_nothing_to_invalidate(self, capfd: Any) -> None:
        graphs, module = Graphs(), nn.Linear(3, 3)
        kind = type("Kind", (nn.Linear,), {})
        module.__class__ = kind
        compiled(lambda module, x: module(x), graphs)(module, X)
        settle()
        assert graphs.left == 0
        del module, kind
        settle()
        assert capfd.readouterr().err == ""  # nothing that a finalizer has raised


class TestTrainings:
    @pytest.mark.parametrize("options", [STEP, {"scope": "regions"}], ids=["step", "regions"])
    @pytest.mark.parametrize(
        "model", [Small, pytest.param(WithBreaks, marks=breaks_need_isolation)], ids=["whole", "breaks"]
    )
    def test_one_that_is_over_leaves_nothing(self, model: type[Small], options: dict[str, Any]) -> None:
        graphs = Graphs()

        def train() -> None:
            callback = hot(backend=graphs, **options)
            fit(seeded(model), [callback], max_steps=8)
            assert_proven(callback.report)

        train()
        settle()
        assert graphs.made
        assert graphs.left == 0

    def test_nor_what_it_was_traced_with(self) -> None:
        def train() -> None:
            fit(seeded(Small), [hot(backend="eager", **STEP)], max_steps=8)

        def traced_with() -> int:
            settle()
            return sum(type(each) is ShapeEnv for each in gc.get_objects())

        train()
        before = traced_with()
        train()
        assert traced_with() == before
