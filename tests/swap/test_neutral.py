"""Random operations that are taken out: same shapes and dtypes, the same numbers in each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.parity.captured import copy_of
from lightning_hotcompile.swap.parity.neutral import neutralised

ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5)

RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout module": lambda x: nn.Dropout(0.5)(x),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x[None], 0.5),
    "dropout2d": lambda x: F.dropout2d(x[None, None], 0.5),
    "dropout3d": lambda x: F.dropout3d(x[None, None, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "multi head": lambda x: ATTENTION(x, x, x)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "rand": lambda x: torch.rand(4, 8) + torch.rand((4, 8), dtype=torch.float64),
    "randn": lambda x: torch.randn(4, 8, dtype=torch.bfloat16),
    "like": lambda x: torch.rand_like(x) + torch.randn_like(x, dtype=torch.float64),
    "randint": lambda x: torch.randint(1000, (4, 8)) + torch.randint(5, 1000, size=(4, 8)),
    "randint high": lambda x: torch.randint(high=1000, size=(4, 8)),
    "randint_like": lambda x: torch.randint_like(x, 1000) + torch.randint_like(x, 5, 1000),
    "randperm": lambda x: torch.randperm(64),
    "normal": lambda x: torch.normal(x, 1.0) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs()),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, (4, 8)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x.sigmoid().bernoulli(),
    "poisson": lambda x: torch.poisson(x.abs() * 9),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 6) + x.softmax(-1).multinomial(6, True),
    "uniform_": lambda x: torch.empty(4, 8).uniform_(0, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty(4, 8).exponential_(),
    "log_normal_": lambda x: torch.empty(4, 8).log_normal_(),
    "cauchy_": lambda x: torch.empty(4, 8).cauchy_(),
    "geometric_": lambda x: torch.empty(4, 8).geometric_(0.1),
    "bernoulli_": lambda x: torch.empty(4, 8).bernoulli_(0.5),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "in a checkpoint": lambda x: checkpoint(lambda y: F.dropout(y * 2, 0.5), x, use_reentrant=False),
}


def captured(function: Callable[[Tensor], Any], x: Tensor) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(x)
    return graphs[0]


def inputs_of(graph: GraphModule, x: Tensor) -> list[Any]:
    """The real inputs: ``x``, and the parameters that Dynamo has lifted."""
    nodes = graph.graph.find_nodes(op="placeholder")
    given = {tuple(p.shape): p for p in ATTENTION.parameters()}
    return [
        x if tuple(n.meta["example_value"].shape) == (4, 8) else given[n.meta["example_value"].shape]
        for n in nodes
    ]


def run_neutral(function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    graph = captured(function, x)
    return neutralised(graph)(*inputs_of(graph, x))[0]


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_left_is_the_same_in_each_run_and_has_the_same_shape(name: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    graph = captured(RANDOM[name], x)
    inputs = inputs_of(graph, x)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    (noisy,) = graph(*inputs)
    assert not torch.equal(state, torch.get_rng_state()), "the example draws random numbers"

    neutral = neutralised(graph)
    state = torch.get_rng_state()
    (first,), (second,) = neutral(*inputs), neutral(*inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second)
    assert (first.shape, first.dtype) == (noisy.shape, noisy.dtype)
    assert first.isfinite().all()
    (compiled,) = torch._dynamo.lookup_backend("aot_eager")(neutralised(graph), inputs)(*inputs)
    torch.testing.assert_close(compiled, first)


def test_drawn_numbers_are_not_all_equal() -> None:
    x = torch.ones(4, 8)
    for name in ("rand", "randn", "like", "randint", "randperm", "bernoulli", "uniform_", "normal_"):
        values = run_neutral(RANDOM[name], x)
        assert values.unique().numel() > 1, name


def test_bounds_are_kept() -> None:
    x = torch.ones(4, 8)
    values = run_neutral(lambda x: torch.randint(3, 7, (100,)), x)
    assert sorted(values.unique().tolist()) == [3, 4, 5, 6]
    values = run_neutral(lambda x: torch.rand(1000), x)
    assert values.min() >= 0
    assert values.max() < 1


def test_an_operation_that_is_not_known_stays_random() -> None:
    x = torch.full((4, 8), 0.5)
    neutral = neutralised(captured(lambda x: torch.ops.aten.bernoulli.p(x, 0.5), x))
    torch.manual_seed(0)
    runs = [neutral(x)[0] for _ in range(2)]
    assert not torch.equal(*runs)


class TestCopy:
    def test_a_change_of_the_graph_does_not_reach_the_copy(self) -> None:
        graph = captured(
            lambda x: checkpoint(lambda y: F.relu(y) + 1, x, use_reentrant=False), torch.ones(4, 8)
        )
        copied = copy_of(graph)
        for module in graph.modules():
            for node in module.graph.nodes:
                if node.target is F.relu:
                    node.target = torch.neg
            module.recompile()
        assert graph(torch.ones(4, 8))[0].eq(0).all()
        assert copied(torch.ones(4, 8))[0].eq(2).all()

    def test_held_tensors_are_the_same_ones(self) -> None:
        graph = captured(lambda x: x + 1, torch.ones(4, 8))
        graph.weight = nn.Parameter(torch.ones(1))
        with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
            graph.graph.get_attr("weight")
        assert copy_of(graph).weight is graph.weight
