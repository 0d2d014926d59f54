"""A number that a graph computes of constants alone is known while it is traced.

``nn.Transformer`` and its parts ask whether the mask that they are given is the causal one, by a number of a
tensor (``bool((mask == causal).all())``), amid code of torch's own. There Dynamo ends the graph before the
transformer, and leaves all of it to eager. Most such masks are made in the step, of nothing but a size.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hotcompile.swap.tracing.overrides import Override

_OPERATORS = [
    "abs",
    "add",
    "and",
    "eq",
    "ge",
    "getitem",
    "gt",
    "invert",
    "le",
    "lt",
    "mul",
    "ne",
    "neg",
    "or",
    "sub",
    "xor",
]
_METHODS = frozenset(
    f"__{name}__" if name in ("and", "or", "getitem", "invert", "xor") else name
    for name in (
        *_OPERATORS,
        *["__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"],
        *["all", "amax", "amin", "any", "argmax", "argmin", "max", "min"],
        *["logical_and", "logical_not", "logical_or", "logical_xor", "masked_fill", "tril", "triu", "where"],
        *["bool", "clone", "contiguous", "detach", "double", "expand", "float", "half", "int", "long"],
        *["permute", "reshape", "squeeze", "t", "to", "transpose", "type_as", "unsqueeze", "view"],
    )
)
_CHANGES = frozenset(["fill_", "masked_fill_", "tril_", "triu_"])
_MAKES = ["arange", "eye", "full", "full_like", "linspace", "ones", "ones_like", "zeros", "zeros_like"]
_FUNCTIONS = frozenset(
    [getattr(operator, f"__{name}__") for name in _OPERATORS]
    + [getattr(torch, name) for name in (*_MAKES, *_METHODS) if hasattr(torch, name)]
)
"""What draws no number and gives the same each time."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def method(prior: Any, tensor: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "item" and not (args or kwargs) and type(tensor) is TensorVariable and not tensor.source:
            nodes = _made_of_constants(tensor.as_proxy().node)
            if nodes:
                return ConstantVariable.create(_computed(nodes).item())
        return prior(tensor, tx, name, args, kwargs)

    return [Override(TensorVariable, "call_method", method)]


def _made_of_constants(node: Node) -> list[Node]:
    """All nodes that a node is computed of and the node, in order; none if that is not constants alone."""
    found, waiting = {node}, [node]
    while waiting:
        new = [each for each in waiting.pop().all_input_nodes if each not in found]
        found.update(new)
        waiting += new
    changed = [each.meta.get("example_value") for each in found if each.target in _CHANGES]
    if not all(_is_constant(each, changed) for each in found):
        return []
    return [each for each in node.graph.nodes if each in found]


def _is_constant(node: Node, changed: list[Any]) -> bool:
    """Whether it gives the same each time; what something else has changed in place has another version."""
    value = node.meta.get("example_value")
    known = node.target in (_METHODS | _CHANGES if node.op == "call_method" else _FUNCTIONS)
    if not known or node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    return isinstance(value, torch.Tensor) and value._version == sum(each is value for each in changed)


def _computed(nodes: list[Node]) -> Any:
    values: dict[Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                function: Any = node.target
                values[node] = function(*args, **kwargs)
    return values[nodes[-1]]
