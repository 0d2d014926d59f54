"""Changes of tensors that eager hides from autograd's version counters, and compiled code does not.

Autograd counts the changes of a tensor, so that a backward can tell whether what was saved is as it was.
Eager's batch normalisation does not count those of its running statistics, which it saves, and a write to
``tensor.data`` is counted by nobody. Compiled code counts both.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.captured import operation_of

_IN_PLACE = (
    operator.setitem,
    *(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")),
    *(getattr(operator, name) for name in ("iand", "ior", "ixor", "ilshift", "irshift", "imatmul")),
)

_REPLACES_DATA = ("set_", "shallow_copy_data_")
"""How Dynamo writes ``tensor.data = other``; the second one from torch 2.14 on."""


def not_counting(run: CompiledFn, positions: Sequence[int]) -> CompiledFn:
    """``run``, but the version counters of the inputs at these positions are as before.

    Else a backward would raise that needs what eager has saved in the same step: of a batch normalisation
    that ran in eager before it ran compiled, since a part of a region was called by itself, or one of its
    calls was answered by eager.
    """

    def run_and_count_back(*args: Any) -> Any:
        counted = tuple(args[i] for i in positions if not args[i].is_inference())
        with _unsafe_preserve_version_counter(counted):
            return run(*args)

    return run_and_count_back


class HiddenWrites:
    """The tensors that any graph of a run writes to through ``.data``."""

    def __init__(self) -> None:
        self._written: list[weakref.ref[Tensor]] = []

    def seen_by(self, inputs: Sequence[Any], writes: Collection[int]) -> tuple[int, ...]:
        """Positions of the inputs that lie in the memory of one of them.

        Args:
            inputs: of a graph.
            writes: positions of those that this graph writes to itself; they are kept in mind.
        """
        self._written += [weakref.ref(inputs[i]) for i in writes]
        if not self._written:
            return ()
        tensors = [tensor for ref in self._written if (tensor := ref()) is not None]
        memory = {_place_of(tensor) for tensor in tensors} - {None}
        return tuple(i for i, value in enumerate(inputs) if i in writes or _place_of(value) in memory)


def holds_noise(hidden: Collection[int], writes: Collection[int], inputs: Sequence[Any]) -> bool:
    """Whether a graph writes, through ``.data``, what its backward needs and is no parameter.

    Noise, that is, which a later step may draw once more before the backward, though the first one does not.
    Parameters are held in their range that way, and are then as they were.
    """
    return any(i in writes and not isinstance(inputs[i], Parameter) for i in hidden)


def _place_of(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None  # a subclass without memory of its own, which is not compared either


def written_behind_autograd(graph_module: GraphModule) -> frozenset[int]:
    """Positions of the inputs that a captured graph writes to through ``.data``."""
    places = {node: i for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    found = set()
    for node in graph_module.graph.nodes:
        for written in _written_by(node):
            *path, first = _memory_of(written)
            names = {operation_of(step) for step in (node, *path)}
            if first in places and not names.isdisjoint(("_get_data_attr", *_REPLACES_DATA)):
                found.add(places[first])
    return frozenset(found)


def _written_by(node: Node) -> Iterator[Node]:
    """What an operation changes in place: by their names, as torch names them."""
    name = operation_of(node)
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or node.target in _IN_PLACE or name == "__setitem__" or node.kwargs.get("inplace"):
        yield from (arg for arg in node.args[:1] if isinstance(arg, Node))
    out = node.kwargs.get("out")
    yield from (
        part for part in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(part, Node)
    )


def _memory_of(node: Node) -> Iterator[Node]:
    """The node, and those from which it has its memory."""
    yield node
    while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], Node):
        value, source = (n.meta.get("example_value") for n in (node, node.args[0]))
        if isinstance(value, Tensor) and isinstance(source, Tensor) and not _share(value, source):
            return
        node = node.args[0]
        yield node


def _share(a: Tensor, b: Tensor) -> bool:
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return True  # sparse, or a subclass: no memory to be told apart
