"""Operations whose derivative may be infinite, where only outputs without a gradient depend on them.

A step may return what the loss does not use: a signal-to-noise ratio, the root of an error. Eager never asks
for its derivative. AOTAutograd's backward is one function of the gradients of all outputs and takes zeros for
that one, and where the derivative is infinite, 0 times it is NaN, in the gradients of all weights. Any later
batch may be the first one for which it is (a target that is silent).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx import GraphModule

from lightning_hotcompile.swap.parity.captured import is_checkpoint, nodes_in, operation_of

_DIVISIONS = ("AddcdivBackward", "DivBackward")
_NORM = "LinalgVectorNormBackward"
_UNBOUNDED = (
    *_DIVISIONS,
    *("AcosBackward", "AcoshBackward", "AsinBackward", "Atan2Backward", "AtanhBackward", "CdistBackward"),
    *("DistBackward", "ErfinvBackward", "Exp2Backward", "ExpBackward", "Expm1Backward", _NORM),
    *("Log10Backward", "Log1PBackward", "Log2Backward", "LogBackward", "LogitBackward", "NormBackward"),
    *("PowBackward", "ReciprocalBackward", "RsqrtBackward", "SqrtBackward", "StdBackward", "StdMeanBackward"),
    *("TanBackward", "XlogyBackward"),
)
"""Beginnings of autograd's names."""

_DIVIDE = ("addcdiv", "addcdiv_", "div", "div_", "divide", "divide_", "itruediv", "true_divide", "truediv")

_OF_PYTHON = (torch.bool, torch.int64, torch.float64, torch.complex128)
"""What a number of Python's is to autograd."""

Unbounded = Sequence[tuple[str, frozenset[int]]]
"""Names of such operations, each with the places of the outputs that depend on it."""


def divides_by_numbers(graph_module: GraphModule) -> bool:
    """Whether a graph divides by a number that it computes, which may be zero some day.

    To autograd that is a tensor without a dimension, as a constant is. Where a checkpoint has packed what is
    saved, nobody looks at it: it would be computed anew.
    """
    nodes = list(nodes_in(graph_module))
    divisors = (
        each
        for node in nodes
        if operation_of(node) in _DIVIDE
        for each in (*node.args[1:], *node.kwargs.values())
    )
    return any(map(is_checkpoint, nodes)) or any(map(_may_pass_for_a_constant, divisors))


def _may_pass_for_a_constant(divisor: Any) -> bool:
    if not isinstance(divisor, fx.Node):
        return False
    value = divisor.meta.get("example_value")
    return not isinstance(value, Tensor) or _is_like_a_constant(value)  # or a size, or another symbol


def _is_like_a_constant(divisor: Tensor) -> bool:
    return divisor.ndim == 0 and divisor.dtype in _OF_PYTHON


def unbounded(outputs: Sequence[Any], *, by_numbers: bool) -> Unbounded:
    """What outputs depend on that may have an infinite derivative, by autograd's graph of an eager run.

    Args:
        outputs: of the run, before any backward.
        by_numbers: whether what looks like a constant may be none, see :func:`divides_by_numbers`.
    """
    places: dict[Node, set[int]] = {}
    for place, output in enumerate(outputs):
        node = output.grad_fn if isinstance(output, Tensor) else None
        seen, todo = set[Node](), [] if node is None else [node]
        while todo:
            each = todo.pop()
            if each not in seen:
                seen.add(each)
                places.setdefault(each, set()).add(place)
                todo += [following for following, _ in each.next_functions if following is not None]
    return [
        (node.name(), frozenset(of))
        for node, of in places.items()
        if _is_unbounded(node, by_numbers=by_numbers)
    ]


def _is_unbounded(node: Node, *, by_numbers: bool) -> bool:
    name = node.name()
    if not name.startswith(_UNBOUNDED):
        return False
    if name.startswith(_DIVISIONS):
        return (by_numbers or not _is_by_a_constant(node)) and not _is_normalized(node)
    if name.startswith(_NORM):
        return getattr(node, "_saved_ord", None) not in (1, 2)  # 0 where the norm is 0
    exponent = getattr(node, "_saved_exponent", None)
    return not (isinstance(exponent, (int, float)) and (exponent >= 1 or exponent == 0))


def _is_by_a_constant(division: Node) -> bool:
    if division.next_functions[-1][0] is not None:
        return False
    divisor = getattr(division, "_saved_other", None)
    return divisor is not None and _is_like_a_constant(divisor)


def _is_normalized(division: Node) -> bool:
    """Whether it is that of ``F.normalize``: by the norm of what is divided, or by a smallest one."""
    (divided, *_), (divisor, _) = division.next_functions[0], division.next_functions[-1]
    if divisor is not None and divisor.name().startswith("ExpandBackward"):
        divisor = divisor.next_functions[0][0]
    smallest = getattr(divisor, "_saved_min", None)
    if divisor is None or not isinstance(smallest, (int, float)):
        return False
    norm, dtype = divisor.next_functions[0][0], divisor._input_metadata[0].dtype
    is_norm = norm is not None and norm.name().startswith(_NORM) and norm.next_functions[0][0] is divided
    return is_norm and smallest >= torch.finfo(dtype).tiny


def asked_in_vain(found: Unbounded, used: Collection[int]) -> str | None:
    """The name of one that no output depends on that is used, or ``None``.

    Args:
        found: of the outputs.
        used: places of those that a backward has come to.
    """
    return next((name for name, places in found if places.isdisjoint(used)), None)
