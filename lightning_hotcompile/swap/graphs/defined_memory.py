"""Memory that nobody has written to, in a captured graph: zeros.

Whatever lies there is right, so zeros are. A graph that returns such memory, to be filled after a graph
break, would be held against other garbage: right code was taken for wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from lightning_hotcompile.swap.parity.captured import graphs_in

_FUNCTIONS: dict[Any, Any] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
_METHODS = {"new_empty": "new_zeros"}
_UNKNOWN_TO_ZEROS = "memory_format"


def define_memory(graph_module: GraphModule) -> None:
    """Have zeros in place of memory as it was found, in the graph and in the bodies that it calls."""
    for part in graphs_in(graph_module):
        changed = [node for node in part.graph.nodes if _defined(node)]
        if changed:
            part.recompile()


def _defined(node: torch.fx.Node) -> bool:
    if node.op == "call_function" and node.target in _FUNCTIONS:
        if node.target is torch.empty and _UNKNOWN_TO_ZEROS in node.kwargs:
            return False
        node.target = _FUNCTIONS[node.target]
        return True
    if node.op == "call_method" and node.target in _METHODS:
        node.target = _METHODS[str(node.target)]
        return True
    return False
