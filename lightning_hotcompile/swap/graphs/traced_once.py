"""Calls of compiled code with fake tensors, which have shapes but no data.

DDP cuts a large graph into pieces, and Dynamo calls each of them once so while it traces.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensor

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.graphs.graph import Graph, Watch


def once_real(first: CompiledFn, compiled: CompiledFn, graph: Graph, watch: Watch) -> CompiledFn:
    """``first``, except that calls with fake tensors go to the compiled code, and are not counted as runs.

    Args:
        first: called in the first run of a graph.
        compiled: the compiled code of that graph.
        graph: counts the runs of the graph.
        watch: counts the runs of all graphs.
    """

    def run(*args: Any) -> Any:
        if not any(isinstance(arg, FakeTensor) for arg in args):
            return first(*args)
        graph.runs -= 1
        watch.total_runs -= 1
        return compiled(*args)

    return run
