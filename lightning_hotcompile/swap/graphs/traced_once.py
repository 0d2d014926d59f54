"""Calls of compiled code with tensors that hold nothing.

DDP cuts a large graph into pieces, and Dynamo calls each of them once while it traces them.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensor

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.graphs.graph import Graph, Watch


def once_real(first: CompiledFn, compiled: CompiledFn, graph: Graph, watch: Watch) -> CompiledFn:
    """``first``, but for calls with such tensors: they go to the compiled code, and are no runs.

    Args:
        first: what the first run of a graph goes to.
        compiled: its code.
        graph: counts its runs.
        watch: counts those of all graphs.
    """

    def run(*args: Any) -> Any:
        if not any(isinstance(arg, FakeTensor) for arg in args):
            return first(*args)
        graph.runs -= 1
        watch.total_runs -= 1
        return compiled(*args)

    return run
