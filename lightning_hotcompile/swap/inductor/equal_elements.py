"""Forward and backward look at the same numbers where a gradient goes to what is equal to the largest.

The backward of ``amax``, ``amin``, ``norm(p=inf)`` and of ``max`` and ``min`` of all elements asks which of
them are equal to the result. Inductor computes elements anew where that is cheap; by vector instructions in
one kernel and without in another the last digit of a sigmoid is not the same. Then none is equal, and the
gradient is 0 / 0: with torch 2.13 that of ``torch.sigmoid(x[:, None] - x[None]).amax(1)`` may have NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_ATEN = torch.ops.aten
_LARGEST = frozenset({_ATEN.amax.default, _ATEN.amin.default, _ATEN.max.default, _ATEN.min.default})
_PARTITION, _TAG = "min_cut_rematerialization_partition", "recompute"
_NOTE = "hotcompile_compared"
"""In the metadata of such elements: a checkpoint's are computed once more, and only once then."""

_SAME_NUMBERS = frozenset({"alias", "expand", "permute", "reshape", "squeeze", "unsqueeze", "view"})
"""Operations after which a result is still that result."""


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import compile_fx
    from torch._inductor.lowering import lowerings

    theirs: Any = getattr(compile_fx, _PARTITION, None)
    if theirs is None:
        return None

    @functools.wraps(theirs)
    def partition(joint: Any, *args: Any, **kwargs: Any) -> Any:
        for elements in _compared(joint.graph):
            elements.meta.setdefault(_TAG, CheckpointPolicy.MUST_SAVE)
            elements.meta[_NOTE] = True
        return theirs(joint, *args, **kwargs)

    undo = put_in_place({(compile_fx, _PARTITION): partition})
    before: dict[Any, Any] = {op: lowerings[op] for op in _LARGEST if op in lowerings}
    lowerings.update({op: _of_what_is_stored(lowering) for op, lowering in before.items()})

    def undo_all() -> None:
        undo()
        lowerings.update(before)

    return undo_all


def _compared(graph: Graph) -> Iterator[Node]:
    """What is compared with the largest of its elements."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.eq.Tensor):
        for each in map(_source_of, node.args):
            if each is not None and each.target in _LARGEST:
                elements = each.args[0]
                if isinstance(elements, Node) and elements.op == "call_function":
                    yield elements


def _source_of(value: Any) -> Node | None:
    """Where the numbers are from that a view shows."""
    while isinstance(value, Node) and getattr(value.target, "_opname", None) in _SAME_NUMBERS:
        value = value.args[0]
    return value if isinstance(value, Node) else None


def _of_what_is_stored(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """The largest of the elements as the backward reads them, and not of the same computed once more."""

    @functools.wraps(lowering)
    def lowered(elements: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        node = getattr(V.graph, "current_node", None)
        given = node.args[0] if node is not None and node.args else None
        if isinstance(given, Node) and _NOTE in given.meta:
            elements.realize()
        return lowering(elements, *args, **kwargs)

    return lowered


class KeepsElements(Replaces):
    """While any is entered, elements that are compared with their largest are stored, and not computed twice.

    Nothing happens where this torch divides graphs in another way.
    """

    replacement = Replacement(_replace)
