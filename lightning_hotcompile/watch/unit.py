"""Names of what a detector counts: a step told operation by operation, and a cycle of micro-steps."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch


def label(signature: Hashable) -> str:
    """A signature's ``digest`` if it has one, else its ``repr``."""
    digest = getattr(signature, "digest", None)
    return digest if isinstance(digest, str) else repr(signature)


def describe(item: object) -> str:
    """Shape, dtype and device type of a tensor or array; plain values as they are; the rest by type.

    ``repr`` of an arbitrary object may hold an address, which would make every step look new.
    """
    if isinstance(item, (list, tuple)):
        return f"[{','.join(map(describe, item))}]"
    if item is None or isinstance(item, (bool, int, float, complex, str, torch.dtype)):
        return repr(item)
    shape, dtype = getattr(item, "shape", None), getattr(item, "dtype", None)
    if shape is None or dtype is None:
        return type(item).__name__
    return f"{tuple(shape)}:{dtype}:{getattr(getattr(item, 'device', None), 'type', '')}"


@dataclass(frozen=True, kw_only=True)
class RecordedSignature:
    """A step as told by ``record``: the digest of its op names, shapes and dtypes, equal in every process."""

    digest: str
    n_ops: int


@dataclass(frozen=True, kw_only=True)
class UnitSignature:
    """Several micro-steps that share one optimizer step: each run of equal ones with its length."""

    steps: tuple[tuple[Hashable, int], ...]

    @property
    def digest(self) -> str:
        """Digest of the micro-steps' own names and their numbers."""
        text = "".join(f"{label(signature)}*{n};" for signature, n in self.steps)
        return hashlib.sha256(text.encode()).hexdigest()
