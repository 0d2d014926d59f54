"""Reductions on a CPU are vectorised only where Inductor looks at the right elements, and no others.

Inductor may vectorise a loop around a reduction, alone or together with the reduction's own. Where another
loop lies between, it has no result for the rows that are left over after whole vectors, and stores a whole
vector for these. With four heads that lie apart in memory, ``scores.softmax(2)`` of shape ``(batch, nodes,
nodes, heads)`` was NaN with torch 2.13, and what lies behind in memory was overwritten: a graph attention
network ended with "double free or corruption".

Of integers of 8 bit it loads as many as there are numbers of 32 bit in a vector, with zeros behind them, and
compares these, too: with torch 2.11 to 2.14 the least of a row of ``uint8`` pixels is 0, whatever they are,
and where it lies is any number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NAME = "select_tiling"
_WRONG_WITH = {2} if TORCH >= (2, 13) else {1, 2}
"""How many loops are vectorised where rows that are left over have no result."""

_BYTES = frozenset({torch.int8, torch.uint8})
_COMPARE = frozenset({"argmax", "argmin", "max", "min"})


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor.codegen import cpp

    owner: Any = getattr(cpp, "TilingSelect", None)
    if not callable(getattr(owner, _NAME, None)):
        return None
    theirs = vars(owner)[_NAME]

    @functools.wraps(theirs)
    def select_tiling(self: Any, fn_list: Any, var_sizes_list: Any) -> Any:
        factors, tiled, *others = theirs(self, fn_list, var_sizes_list)
        if tiled and any(map(_compares_bytes, _bodies(fn_list))):
            return [], [], *others
        if len(tiled) in _WRONG_WITH and _leaves_rows(tiled[0], factors[0], var_sizes_list):
            factors, tiled = factors[1:], tiled[1:]  # along the reduction only, or not at all
        return factors, tiled, *others

    return put_in_place({(owner, _NAME): select_tiling})


def _leaves_rows(level: int, factor: int, var_sizes_list: Sequence[Any]) -> bool:
    """Whether a loop has rows left over, and neither it nor the next one in it is one of the reduction."""
    from torch._inductor.virtualized import V

    outer, reduction = max(var_sizes_list, key=lambda sizes: len(sizes[1]))
    level %= len(outer) + len(reduction)
    if not reduction or level + 1 >= len(outer):
        return False
    return not V.graph.sizevars.statically_known_multiple_of(outer[level], factor)


def _bodies(fn_list: Sequence[Any]) -> Sequence[Any]:
    from torch._inductor.codegen import cpp_utils

    bodies_of: Any = getattr(cpp_utils, "_get_loop_body", None)
    bodies: Sequence[Any] = bodies_of(fn_list) if bodies_of is not None else ()
    return bodies


def _compares_bytes(body: Any) -> bool:
    """Whether a loop looks for the least or largest of integers of 8 bit."""
    reductions = body.root_block.graph.find_nodes(op="call_method", target="reduction")
    return any(node.args[3] in _COMPARE and _BYTES & {*node.args[1:3]} for node in reductions)


class KeepsResultsOfRows(Replaces):
    """While any is entered, no reduction is vectorised that would miss rows, or compare more than there is.

    Nothing happens where this torch chooses loops in another way.
    """

    replacement = Replacement(_replace)
