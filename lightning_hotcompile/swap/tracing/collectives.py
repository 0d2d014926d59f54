"""Collectives of ``torch.distributed`` are called by Python, once and in the order of the step.

Dynamo would put another operation in place of ``all_reduce`` and the like. Its backward reduces once more,
which eager's does not; one of a constant (``torch.tensor(8.0)``) runs while it is traced; and a comparison
runs it several times. The other ranks, which may run this step eagerly, meet their next collective meanwhile.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.parity.captured import nodes_in
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})


def overrides() -> list[Override]:
    """A collective ends the graph."""

    def call(prior: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        end_graph(
            "collective of torch.distributed",
            f"{variable}",
            "All ranks come to it in the same order, compiled or not.",
        )

    return [Override(CollectiveFunctionRewriteVariable, "call_function", call)]


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
