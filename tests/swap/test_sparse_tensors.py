"""Sparse tensors of a module: what is around their use is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

NODES = 6


def edges() -> Tensor:
    return (torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(1)) < 0.5).float()


class Graph(nn.Module):
    """A layer, and which node has an edge to which."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.edges = edges().to_sparse(layout=layout)
        self.passes = 2
        self.register_buffer("kept", edges().to_sparse())


def is_multiplied(graph: Graph, x: Tensor) -> Tensor:
    return F.relu(torch.sparse.mm(graph.edges, graph.layer(x).sin())).cos()


def is_a_buffer(graph: Graph, x: Tensor) -> Tensor:
    return torch.matmul(graph.kept, graph.layer(x).sin()).cos()


def is_multiplied_by_its_method(graph: Graph, x: Tensor) -> Tensor:
    return graph.edges.mm(graph.layer(x).sin()).cos()


def is_multiplied_in_a_loop(graph: Graph, x: Tensor) -> Tensor:
    x = graph.layer(x)
    found = [x]
    for _ in range(graph.passes):
        x = torch.sparse.mm(graph.edges, x)
        found.append(x.sin())
    return torch.stack(found, 1).mean(1)


def is_made_dense(graph: Graph, x: Tensor) -> Tensor:
    return graph.edges.to_dense() @ graph.layer(x).sin()


def is_asked_what_it_is(graph: Graph, x: Tensor) -> Tensor:
    kind = 1.0 * torch.is_tensor(graph.edges) + 2.0 * isinstance(graph.edges, Tensor)
    return graph.layer(x).sin() * (kind + 4.0 * (graph.edges is None)) + torch.sparse.sum(graph.kept)


def loses_edges(graph: Graph, x: Tensor) -> Tensor:
    values = graph.kept.coalesce().values()
    kept = torch.rand(values.size(0)) < 0.5
    places = graph.kept.coalesce().indices()[:, kept]
    fewer = torch.sparse_coo_tensor(places, values[kept] * 2, (NODES, NODES), check_invariants=False)
    return torch.sparse.mm(fewer, graph.layer(x)).cos()


def is_multiplied_by_an_operator(graph: Graph, x: Tensor) -> Tensor:
    return (graph.edges @ graph.layer(x).sin()).cos()


def is_asked_for_its_shape(graph: Graph, x: Tensor) -> Tensor:
    return torch.sparse.mm(graph.edges, graph.layer(x).sin()) * graph.edges.shape[0]


def has_a_branch(graph: Graph, x: Tensor) -> Tensor:
    x = graph.layer(x).sin()
    return torch.sparse.mm(graph.edges, x) if graph.edges.is_sparse else graph.edges @ x


COMPILED = {
    is_multiplied: 2,
    is_a_buffer: 2,
    is_multiplied_by_its_method: 2,
    is_multiplied_in_a_loop: 3,
    is_made_dense: 1,
    is_asked_what_it_is: 1,
}
USES = [*COMPILED, loses_edges, is_multiplied_by_an_operator, is_asked_for_its_shape, has_a_branch]
Use = Callable[[Graph, Tensor], Tensor]


def run(function: Any, graph: Graph, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(0)
    graph.zero_grad()
    out = function(graph, x)
    out.sum().backward()
    return [out, torch.rand(1), *(p.grad for p in graph.parameters())]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("use", USES)
def test_what_is_around_its_use_is_compiled(use: Use, layout: torch.layout) -> None:
    backend, graph = Counting(), seeded(lambda: Graph(layout))
    compiled = CompiledFunction(use, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed in range(3):
            x = torch.rand(NODES, 4, generator=torch.Generator().manual_seed(seed))
            expected, found = run(use, graph, x), run(compiled.compile, graph, x)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)
    assert backend.graphs >= COMPILED.get(use, 0)


def test_another_one_is_used_from_then_on() -> None:
    graph = seeded(lambda: Graph(torch.sparse_coo))
    compiled = CompiledFunction(is_multiplied, Counting(), dynamic=None, fullgraph=False)
    x = torch.rand(NODES, 4)
    with compiling_allowed(suppress_errors=False):
        for made in (graph.edges, graph.edges * 2, torch.eye(NODES).to_sparse(), torch.eye(NODES)):
            graph.edges = made
            assert torch.equal(compiled.compile(graph, x), is_multiplied(graph, x))


class Convolving(Small):
    """A graph convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = edges().to_sparse()
        self.nodes = nn.Embedding(NODES, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        around = torch.sparse.mm(self.edges, self.nodes.weight.tanh())
        nodes = F.dropout(torch.relu(around), 0.2, self.training)
        return super().training_step((batch[0] + nodes[batch[1]], batch[1]), batch_idx)


def test_a_step_with_one_runs_compiled() -> None:
    plain, model, backend = seeded(Convolving), seeded(Convolving), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    assert (callback.report.graph_breaks, callback.report.recompiles) == (1, 0)
    assert backend.graphs == 2
