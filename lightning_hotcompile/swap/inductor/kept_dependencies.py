"""Inductor's code for a CPU reads a buffer after the operation that changes it.

To fuse two loops of different ranges Inductor writes one of them anew, and asks again what it reads. Of a
buffer that another operation changes in place (``scatter_reduce``, ``index_put``, ``bernoulli_``) it then
knows the name from before that change, so the fused loop may come first and read what is not there yet: with
torch 2.13 ``gelu(layer_norm(x)) * zeros.scatter_reduce(...)`` is wrong, and no error says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NAME = "recompute_size_and_body"
_NEEDED = ("set_read_writes", "update_mutated_names", "refresh_dependencies", _NAME)


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import dependencies, scheduler

    node: Any = scheduler.SchedulerNode
    if not all(callable(getattr(node, name, None)) for name in _NEEDED):
        return None
    theirs = vars(node)[_NAME]

    @functools.wraps(theirs)
    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        reads, added = self.read_writes.reads, (dependencies.WeakDep, dependencies.StarDep)
        after = type(reads)(each for each in reads if isinstance(each, added))
        theirs(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(after).rename(self.mutation_renames))

    return put_in_place({(node, _NAME): recompute})


class KeepsDependencies(Replaces):
    """While any is entered, a loop that Inductor writes anew still comes after what it came after.

    Nothing happens where this torch writes loops anew in another way.
    """

    replacement = Replacement(_replace)
