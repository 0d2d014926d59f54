"""From which size on Inductor's code for a CPU shares a loop among threads.

By default each thread gets 512 elements or more. Two threads then share a loop of 1,024 elements, which one
of them has done in a fraction of a microsecond; to start and to meet takes them longer than that. PyTorch's
own operations share from 32,768 elements on.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.fx import GraphModule

NAME = "cpp.min_chunk_size"
"""Inductor's option: the least number of elements for each thread."""

SHARED_FROM = 16_384
"""Elements of a loop that is shared, by however many threads.

On two threads (2 x 8,192) most steps of 25 small models took 1 to 6% less time than by default, and none of
them 1% more, but for one with 16 embeddings: see ``MOST_SCATTERS``.
"""

MOST_SCATTERS = 3
"""In a graph whose small loops are not shared.

The backwards of several embeddings come to be one loop, which adds to as many tensors for each of its
elements: with 16 of them 4,096 elements took 0.26 ms on one thread and 0.15 ms on two.
"""

_SCATTER = frozenset(
    {"embedding", "embedding_bag", "gather", "index_select", "take_along_dim"}
    | {"index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_"}
    | {"scatter_reduce", "scatter_reduce_"}
)
"""Names of calls that scatter, or whose backward does."""

_BY_DEFAULT = 512
_VARIABLE = "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE"


def options(graph_module: GraphModule) -> dict[str, Any]:
    """Inductor's option for this graph and the threads that there are now; none where somebody has chosen.

    Args:
        graph_module: as Dynamo has captured it.
    """
    import torch._inductor.config as inductor_config  # takes a third of a second: not for a run without flip

    if _VARIABLE in os.environ or inductor_config.cpp.min_chunk_size != _BY_DEFAULT:
        return {}
    if _scatters(graph_module) > MOST_SCATTERS:
        return {}
    threads = inductor_config.cpp.threads
    each = SHARED_FROM // (threads if threads > 0 else torch.get_num_threads())
    return {NAME: max(_BY_DEFAULT, each)}


def _scatters(graph_module: GraphModule) -> int:
    """How many calls of it scatter, in graphs inside of it too."""
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, GraphModule))
    return sum(_name(node.target) in _SCATTER for graph in graphs for node in graph.nodes)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
