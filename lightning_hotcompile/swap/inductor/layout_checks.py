"""How an optimizer's code looks at the layout of its tensors: at all of them in one call.

Inductor's code checks sizes and strides of each tensor that it is given, one by one; with the parameters,
gradients and state of an optimizer that is up to 3% of a whole step. No guard of Dynamo's looks at them, so
they have to be checked, but one call is enough.

Code that autograd runs backwards keeps Inductor's own checks. Hooks on saved tensors (offloading, say) may
give a backward tensors of another layout, and a few of torch's operations return another one than they were
captured with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.captured import nodes_in

WITHOUT: dict[str, Any] = {"size_asserts": False}
"""Inductor's options for code that does not check."""

_VARIABLE = "TORCHINDUCTOR_SIZE_ASSERTS"

_OWN_MODULES = frozenset({"torch", "builtins", "operator", "_operator", "math"})
_WITH_CODE_OF_OTHERS = ("<locals>", "flat_apply")
"""In names of torch's wrappers around functions that Dynamo was told not to look into."""

_KNOWN_TO_DIFFER = ("linalg", "fft")
"""In names of torch's operations of which some return another layout than they were captured with."""

_OWN_OPERATIONS = frozenset({"aten", "prim", "prims", "higher_order"})


def why_needed(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Why the code of this graph has to check one by one; ``None`` if one look at its inputs is enough.

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
    """
    if _VARIABLE in os.environ:
        return f"{_VARIABLE} is set"  # whatever it says: Inductor obeys it
    if any(map(_varies, example_inputs)):
        return "not all inputs are tensors of one size, and a library may choose another layout for another"
    foreign = (node for node in nodes_in(graph_module) if not _is_torchs_own(node))
    return next((f"{node.target} is not torch's own" for node in foreign), None)


def held_by(graph_module: GraphModule) -> tuple[Tensor, ...]:
    """Tensors that are part of the graph, and no inputs: Dynamo has no guard on their layout."""
    return (*graph_module.parameters(), *graph_module.buffers())


def guards_of(tensors: Sequence[Tensor]) -> TensorGuards:
    """One call tells whether as many other tensors have the sizes, strides, dtype and device of these."""
    make: Any = TensorGuards  # its stub knows of no lists of sizes
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: TensorGuards = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards


class LayoutChangedError(RuntimeError):
    """A tensor lies otherwise in memory than when the code was compiled; nothing of it has run."""


def checked(compiled: CompiledFn, example_inputs: Sequence[Any], held: tuple[Tensor, ...] = ()) -> CompiledFn:
    """The same function, which looks at the layout of all its tensors first, in one call.

    Args:
        compiled: takes inputs one by one.
        example_inputs: that it was compiled for.
        held: tensors beside them that it uses.

    Returns:
        A function that raises :class:`LayoutChangedError` before anything has run.
    """
    expected = [_layout(value) for value in (*example_inputs, *held)]
    guards: TensorGuards | None = None

    def run(*args: Any) -> Any:
        nonlocal guards
        if guards is None or not guards.check(*args, *held):
            tensors = (*args, *held)
            if (found := [_layout(value) for value in tensors]) != expected:
                was, now = next((a, b) for a, b in zip(expected, found, strict=True) if a != b)
                raise LayoutChangedError(f"a tensor of sizes and strides {_words(was)} has {_words(now)} now")
            # What it asks beyond that (a mode, the stride of a single row) has changed: it is made anew.
            guards = guards_of(tensors)
        return compiled(*args)

    return run


def _layout(value: Tensor) -> tuple[Any, ...]:
    """Sizes, strides, dtype and device; as in Inductor's check the stride of a single row does not matter."""
    if value.layout is not torch.strided:
        return tuple(value.shape), value.layout, value.dtype, value.device
    matters = value.numel() > 0
    strides = (n if matters and size > 1 else 0 for size, n in zip(value.shape, value.stride(), strict=True))
    return tuple(value.shape), tuple(strides), value.dtype, value.device


def _words(layout: tuple[Any, ...]) -> str:
    return ", ".join(map(str, layout))


def _varies(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return True
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _is_torchs_own(node: Node) -> bool:
    """Whether what this node returns has the layout that its stand-in had when the graph was captured."""
    if node.op != "call_function":
        return node.op != "call_module"
    try:
        first, *rest = _get_qualified_name(node.target).split(".")  # type: ignore[arg-type]
    except RuntimeError:  # it has no name
        return False
    name = f"{node.target} {getattr(node.target, '__qualname__', '')}"
    if any(part in name for part in (*_WITH_CODE_OF_OTHERS, *_KNOWN_TO_DIFFER)):
        return False
    if first == "torch" and rest[:1] == ["ops"]:
        return rest[1] in _OWN_OPERATIONS
    return first in _OWN_MODULES
