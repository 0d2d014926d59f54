"""Random permutations that Inductor can compile: ``x[torch.randperm(len(x))]`` of mixup and shuffled keys.

Torch 2.13 raises for it: its rewrite of indexing by a part of a permutation asks for the size of the part,
and here is none. It knows a permutation by the operation's usual variant; the one that takes a generator is
the same operation, and stays as it is.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.parity.captured import graphs_in

_KNOWN = frozenset({"dtype", "layout", "device", "pin_memory"})


def plain_permutations(graph_module: GraphModule) -> None:
    """Have the permutations of a graph, and of the bodies that it calls, drawn by the other variant."""
    for part in graphs_in(graph_module):
        found = part.graph.find_nodes(op="call_function", target=torch.randperm)
        for node in found:
            _draw_by_generator(node)
        if found:
            part.recompile()


def _draw_by_generator(node: Node) -> None:
    has_device = "device" in node.kwargs or torch.get_default_device().type == "cpu"
    if has_device and _KNOWN.issuperset(node.kwargs):  # the variant is told of no default device
        node.target = torch.ops.aten.randperm.generator
        node.kwargs = {**node.kwargs, "generator": None}
