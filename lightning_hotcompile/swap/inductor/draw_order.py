"""Operations that draw random numbers run in the order in which eager runs them.

Inductor orders operations by what they read, and else by the memory that is needed at once: two draws that
read nothing of each other may change places, and each then gets the other's numbers. (Torch 2.13, a noise of
which nothing was used between two dropouts.) An in-place ``bernoulli_`` that is in no use is even left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_LAST = "_hotcompile_last_draw"
_AND_SAVES = frozenset({"run_and_save_rng_state"})
"""What draws in the body of an activation checkpoint, to be repeated in the backward."""
_AFTER = "additional_buffer_deps"
"""Where a graph in the making keeps after which buffers an operation has to come, besides those it reads."""


_MADE_BY = {"FallbackKernel": ("kernel", 2), "InplaceBernoulliFallback": ("op_overload", 1)}
"""Classes of operations that may draw; name and place of the parameter that says what is called."""


@functools.cache
def _draws(kernel: Any) -> bool:
    """Whether an operation says of itself that it depends on a generator's state, or calls one that does."""
    if isinstance(kernel, torch._ops.HigherOrderOperator):
        return str(kernel) in _AND_SAVES
    return isinstance(kernel, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in kernel.tags


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import ir

    ours = {}
    for name, (kernel, place) in _MADE_BY.items():
        constructor = getattr(getattr(ir, name, None), "__init__", None)
        if constructor and list(inspect.signature(constructor).parameters)[place : place + 1] == [kernel]:
            ours[getattr(ir, name), "__init__"] = _in_order(constructor, place - 1)
    return put_in_place(ours) if ours else None


def _in_order(constructor: Callable[..., None], place: int) -> Callable[..., None]:
    from torch._inductor.virtualized import V

    @functools.wraps(constructor)
    def in_order(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if len(args) > place and _draws(args[place]):
            _put_after_the_last(self, V.graph)
            self.has_side_effects = _always  # else one whose numbers are in no use is left out

    return in_order


def _always() -> bool:
    return True


def _put_after_the_last(operation: Any, graph: Any) -> None:
    after, name = getattr(graph, _AFTER, None), operation.operation_name
    if after is None or name is None or operation.name is None:
        return
    if (last := vars(graph).get(_LAST)) is not None:
        after[name].add(last)
    setattr(graph, _LAST, operation.name)


class DrawsInOrder(Replaces):
    """While any is entered, Inductor leaves operations that draw random numbers in their order.

    Nothing happens where this torch makes such operations in another way.
    """

    replacement = Replacement(_replace)
