"""Objects of any class as batches, or in them: a graph with its edges, a bunch of fields.

Lightning takes whatever a loader gives. What such an object holds is looked at without running code of its
class, and only so far: through a reference to its data set, say, it holds everything.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_MOST_PARTS = 256
_DEEPEST = 8
_LONGEST = 10_000
"""A list of so many plain values may be of a sample: token ids, a polygon."""

_NO_HOLDERS = (nn.Module, enum.Enum, type, types.ModuleType, types.FunctionType, types.MethodType)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
PLAIN = (int, float, complex, str, bytes, bool, type(None))
"""Types of values that hold nothing."""


def attributes_of(value: object) -> dict[str, Any]:
    """What an object holds, if there is a tensor in it, and not too much besides; else nothing.

    Plain values that its class keeps for itself (names that begin with ``_``) are left out: they may be
    counters and caches.
    """
    if not _holds_tensors([value]):
        return {}
    return {
        name: item
        for name, item in _own(value).items()
        if type(item) not in _PROXIES and (not name.startswith("_") or _holds_tensors([item]))
    }


def _holds_tensors(values: Sequence[Any]) -> bool:
    """Whether there are tensors in them, and not too many parts at too many levels: one may hold itself."""
    found, left = False, _MOST_PARTS
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for value in values:
            if issubclass(type(value), Tensor):
                found = True
                continue
            parts = _parts_of(value)
            left -= len(parts)
            if left < 0:
                return False
            inside += parts
        if not inside:
            return found
        values = inside
    return False


def _parts_of(value: Any) -> Sequence[Any]:
    kind = type(value)
    if issubclass(kind, (tuple, list)):
        is_plain = len(value) <= _LONGEST and set(map(type, value)).issubset(PLAIN)
        return () if is_plain else value
    if issubclass(kind, Mapping):
        return range(len(value)) if len(value) > _MOST_PARTS else list(value.values())
    return list(_own(value).values())


def _own(value: object) -> Mapping[str, Any]:
    if issubclass(type(value), (*_NO_HOLDERS, *_PROXIES)):
        return {}
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}
