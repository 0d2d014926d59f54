"""Two operations that draw random numbers are not taken for one.

AOTAutograd computes once what a graph computes twice, and goes by a list of what draws random numbers. That
list is short: of two ``torch.randn_like(x)`` one is left, so two views of a batch get the same noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_LIST = "rand_ops"


class _RandomOps(list[Any]):
    """What the list has, and all operations that say of themselves that they draw."""

    def __contains__(self, target: object) -> bool:
        return super().__contains__(target) or _draws(target)


@functools.cache
def _draws(target: Any) -> bool:
    """Whether any variant of an operation is said to depend on a generator's state."""
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return False
    packet: Any = target
    variants = [getattr(packet, name) for name in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in variant.tags for variant in variants)


def _replace() -> Callable[[], None] | None:
    from torch._functorch import compile_utils

    theirs = getattr(compile_utils, _LIST, None)
    if not isinstance(theirs, list):
        return None
    return put_in_place({(compile_utils, _LIST): _RandomOps(theirs)})


class DrawsStaySeparate(Replaces):
    """While any is entered, each operation that draws random numbers runs as often as eager runs it.

    Nothing happens where this torch has no such list.
    """

    replacement = Replacement(_replace)
