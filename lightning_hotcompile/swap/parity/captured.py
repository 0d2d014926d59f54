"""The captured graph: a copy that no backend can change, and the tensors that it holds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch import Tensor
from torch.fx import GraphModule, Node


def copy_of(graph_module: GraphModule, change: Callable[[Node], None] = lambda node: None) -> GraphModule:
    """The same graph, bodies of checkpoints and other subgraphs included, with the same tensors.

    A backend may rewrite the graph that it is given: what it computes is then held against this copy.

    Args:
        graph_module: the graph.
        change: called with each node of the copy, for example to replace its target.
    """
    copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph), type(graph_module).__name__)
    for name, child in list(copied.named_children()):
        if isinstance(child, GraphModule):
            setattr(copied, name, copy_of(child, change))
    for node in copied.graph.nodes:
        change(node)
    copied.recompile()
    return copied


def tensors_of(graph_module: GraphModule) -> list[Tensor]:
    """Tensors that the graph holds by itself: Dynamo puts an optimizer's parameters and state there."""
    held = [*graph_module.parameters(), *graph_module.buffers()]
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = functools.reduce(getattr, str(node.target).split("."), graph_module)
        if isinstance(value, Tensor):
            held.append(value)
    return list({id(t): t for t in held}.values())


def count_ops(graph_module: GraphModule) -> int:
    """How many operations a graph has."""
    return sum(n.op in ("call_function", "call_method", "call_module") for n in graph_module.graph.nodes)
