"""Graphs with collectives of ``torch.distributed`` that the user calls in their functional form."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.parity.captured import nodes_in

_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})


def why_not_captured(graph_module: GraphModule) -> str | None:
    """Why a graph must not run as it was captured, compiled or not; ``None`` if it may.

    Functional collectives of torch's that the user calls become a part of it. Bodies of checkpoints and
    other subgraphs count too.
    """
    nodes = filter(_is_collective, nodes_in(graph_module))
    found = ", ".join(dict.fromkeys(str(node.target) for node in nodes))
    return f"it holds collectives of torch.distributed ({found}), which are left to eager" if found else None


def _is_collective(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).partition(".")[0] in _NAMESPACES
