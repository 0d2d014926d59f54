"""Rows that Inductor's code for a CPU keeps beside a loop are those of one turn of the loop.

What one loop nest leaves for the next within a shared outer loop goes into a buffer of one row. Where the
outer loop goes by 16 rows, since its elements are what lies apart in memory (a slice of a wider tensor), all
16 were written to that one row: with torch 2.13 the gradient of ``x[:, 8:16].softmax(-1).cumsum(-1)`` can be
that of its last row everywhere, and no error says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NAME = "check_outer_fusion_loop_level_attr"


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    node: Any = getattr(cpp, "OuterLoopFusedSchedulerNode", None)
    if not callable(getattr(node, _NAME, None)):
        return None
    theirs = vars(node)[_NAME]

    @functools.wraps(theirs)
    def can_share(self: Any, loops: Any, depth: int) -> bool:
        kept = getattr(V.local_buffer_context, "local_buffers", None)
        return theirs(self, loops, depth) and not (kept and _goes_by_several(loops, depth))

    return put_in_place({(node, _NAME): can_share})


def _goes_by_several(loops: Any, depth: int) -> bool:
    """Whether a shared loop takes more than one row at a time."""
    return any(level.steps != 1 for each in loops for level in each.loop_nest.loops[:depth])


class KeepsRowsApart(Replaces):
    """While any is entered, loops that take several rows at a time share no buffer of one row.

    Nothing happens where this torch shares loops in another way.
    """

    replacement = Replacement(_replace)
