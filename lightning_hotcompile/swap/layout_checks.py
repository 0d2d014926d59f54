"""Whether compiled code has to look at the layout of its tensors in each call: only where nothing else does.

Inductor's code checks sizes and strides of what it is given and of what library calls return, before it
uses them; with many small tensors that is 1 to 4% of a step. In a graph of training code Dynamo's guards
have looked at inputs, parameters and buffers already, AOTAutograd gives gradients the layout that the
backward was compiled for, and what torch's own operations return depends on nothing else. The first real
run of each graph is compared with eager.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name

WITHOUT: dict[str, Any] = {"size_asserts": False}
"""Inductor's options for code that does not check."""

_VARIABLE = "TORCHINDUCTOR_SIZE_ASSERTS"

_OWN_MODULES = frozenset({"torch", "builtins", "operator", "_operator", "math"})
_OWN_OPERATIONS = frozenset({"aten", "prim", "prims", "higher_order"})


def why_needed(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Why the code of this graph has to check, though its inputs are guarded; ``None`` if it need not.

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
    """
    if _VARIABLE in os.environ:
        return f"{_VARIABLE} is set"  # whatever it says: Inductor obeys it
    if any(map(_varies, example_inputs)):
        return "sizes vary, and a library may choose another layout for some of them"
    if any(True for _ in (*graph_module.parameters(), *graph_module.buffers())):
        return "the graph holds tensors that no guard looks at"
    graphs = (module for module in graph_module.modules() if isinstance(module, GraphModule))
    foreign = (node for graph in graphs for node in graph.graph.nodes if not _is_torchs_own(node))
    return next((f"{node.target} is not torch's own" for node in foreign), None)


def _varies(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_torchs_own(node: Node) -> bool:
    """Whether what this node returns has the layout that its stand-in had when the graph was captured."""
    if node.op != "call_function":
        return node.op != "call_module"
    try:
        first, *rest = _get_qualified_name(node.target).split(".")  # type: ignore[arg-type]
    except RuntimeError:  # it has no name
        return False
    if first == "torch" and rest[:1] == ["ops"]:
        return rest[1] in _OWN_OPERATIONS
    return first in _OWN_MODULES
