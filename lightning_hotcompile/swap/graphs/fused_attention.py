"""Attention that the user's code has fused, in a graph that is to run as it was captured.

A step may call ``torch.compile(flex_attention)``, of which Dynamo captures the operation inside. Run as it
is, that holds the scores of all pairs of positions, several times over, which the user's step never has: of
32 heads and 32,768 positions one copy takes 128 GiB.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.parity.captured import nodes_in
from lightning_hotcompile.swap.process.free_memory import free_memory

_NAME = "flex_attention"
_BYTES = 4 * 4
"""For each score: they are of 32 bit, and there are up to four of them at one time."""


def why_not_as_captured(graph_module: GraphModule) -> str | None:
    """Why a graph cannot run eagerly on what is free, ``None`` if it holds no such attention or it can."""
    inputs = [_query_and_key(node) for node in nodes_in(graph_module) if _is_fused_attention(node)]
    found = [(_needed(*each), each[0].device) for each in inputs if each is not None]
    if not found:
        return None
    needed, device = max(found, key=lambda each: each[0])
    free = free_memory(device)
    if free is None or needed <= free:
        return None
    return f"its attention is fused; eagerly it would take {needed >> 20} MB, and {free >> 20} MB are free"


def _is_fused_attention(node: Node) -> bool:
    return node.target is getattr(torch.ops.higher_order, _NAME, None)


def _query_and_key(node: Node) -> tuple[Tensor, Tensor] | None:
    """As they were while the graph was captured; ``None`` where that is not known."""
    query, key = (arg.meta.get("example_value") if isinstance(arg, Node) else None for arg in node.args[:2])
    return (query, key) if isinstance(query, Tensor) and isinstance(key, Tensor) else None


def _needed(query: Tensor, key: Tensor) -> int:
    """Bytes of all scores."""
    return _BYTES * math.prod(map(_size, (*query.shape[:-1], key.shape[-2])))


def _size(size: Any) -> int:
    """Of a dimension that varies, that in this batch."""
    return size if isinstance(size, int) else int(size.node.hint)
