"""From which size on Inductor's code for a CPU shares a loop among threads.

By default each thread gets 512 elements or more. Two threads then share a loop of 1,024 elements, which one
of them has done in a fraction of a microsecond; to start and to meet takes them longer than that. PyTorch's
own operations share from 32,768 elements on.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap import cpp_wrapper

NAME = "cpp.min_chunk_size"
"""Inductor's option: the least number of elements for each thread."""

CHUNK = 8_192
"""Elements for each of two threads, by how many loops are shared here.

Most steps of 24 small models took 1 to 6% less time than by default, the others as long, within what a
measurement is good to, but for one with 16 embeddings: see ``MOST_SCATTERS``.
"""

THREADS = 2
"""With which this was measured. For more of them Inductor's number decides as well which of nested loops are
shared, and nobody has measured that."""

MOST_SCATTERS = 3
"""In a graph whose small loops are not shared.

The backwards of several embeddings come to be one loop, which adds to as many tensors for each of its
elements: with 16 of them 4,096 elements took 0.26 ms on one thread and 0.15 ms on two.
"""

_SCATTER = frozenset(
    {"embedding", "gather", "index_select", "take_along_dim"}
    | {"index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_"}
    | {"scatter_reduce", "scatter_reduce_"}
)
"""Names of calls that scatter, or whose backward does."""

_BY_DEFAULT = 512
_VARIABLE = "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE"
_OF_THREADS = frozenset({"cpp.threads", "cpp.dynamic_threads"})


def options(
    graph_module: GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Inductor's option for this graph; none where it was not measured, or somebody has chosen.

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
        given: Inductor's options, as the user gave them.
    """
    import torch._inductor.config as inductor_config  # takes a third of a second: not for a run without flip

    cpp = inductor_config.cpp
    if _VARIABLE in os.environ or cpp.min_chunk_size != _BY_DEFAULT or _OF_THREADS & given.keys():
        return {}
    if cpp.dynamic_threads or (cpp.threads if cpp.threads > 0 else torch.get_num_threads()) != THREADS:
        return {}
    if cpp_wrapper.why_not_possible(graph_module, example_inputs) is not None:
        return {}  # elsewhere than on the CPU it would only be a part of the key
    if any(map(_varies, example_inputs)):
        return {}  # the sizes that decide are those of one batch, which may be a short one
    return {} if _scatters(graph_module) > MOST_SCATTERS else {NAME: CHUNK}


def _varies(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _scatters(graph_module: GraphModule) -> int:
    """How many calls of it scatter, in graphs inside of it too."""
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, GraphModule))
    return sum(_is_scatter(node) for graph in graphs for node in graph.nodes)


def _is_scatter(node: Node) -> bool:
    if node.target in (operator.getitem, operator.setitem):
        index = node.args[1]
        return any(map(_is_tensor, index if isinstance(index, tuple) else (index,)))
    target = node.target
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    return node.op in ("call_function", "call_method") and name.partition(".")[0] in _SCATTER


def _is_tensor(index: object) -> bool:
    return isinstance(index, Node) and isinstance(index.meta.get("example_value"), Tensor)
