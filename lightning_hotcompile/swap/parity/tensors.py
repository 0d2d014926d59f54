"""Tensors of two runs, made fit to be held against each other."""

from __future__ import annotations

import torch
from torch import Tensor

HAVE_64_BIT = ("cpu", "cuda")
"""Devices that have 64-bit numbers for certain; Apple's GPUs (MPS) have none."""

AT_A_TIME = 1 << 22
"""Elements that are compared at once, so that a comparison takes next to no memory."""

_OF_8_BITS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def comparable(tensor: Tensor) -> Tensor:
    """8-bit floats, with which torch can hardly do anything, as 16-bit ones, which have all their numbers."""
    return tensor.to(torch.bfloat16) if tensor.dtype in _OF_8_BITS else tensor


def dense(tensor: Tensor) -> Tensor:
    """Nor can sparse gradients of embeddings be compared as they are."""
    return comparable(tensor) if tensor.layout is torch.strided else tensor.to_dense()


def odd_alike(x: Tensor, y: Tensor) -> Tensor | None:
    """Where both have the same infinity, or NaN; ``None`` if that is nowhere."""
    if not (x.is_floating_point() or x.is_complex()) or bool(x.isfinite().all()):
        return None
    return ~x.isfinite() & ((x == y) | (x.isnan() & y.isnan()))


def without_odd_places(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros where they have the same infinity, or NaN: one of them would hide all other numbers."""
    places = odd_alike(x, y)
    return (x, y) if places is None else (x.masked_fill(places, 0), y.masked_fill(places, 0))
