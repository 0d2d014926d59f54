"""Attributes that stand over a module's own for a while, and are left out of copies of the module.

``copy`` and ``pickle`` ask an object for its ``__getstate__``. While a module is covered it has one of its
own, which answers with the state that the module would have without its covers. A class that copies the
attributes of its modules by itself, in a ``__deepcopy__`` say, copies the covers as well.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn

_COVERS = "_hotcompile_covers"
_GETSTATE = "__getstate__"


class Cover:
    """Some attributes of a module, and those of the same names that were there before."""

    __slots__ = ("before", "over")

    def __init__(self, over: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        self.over = over
        self.before = {name: attributes[name] for name in over if name in attributes}

    def lift(self, attributes: dict[str, Any]) -> None:
        """Put back what was there before; what somebody else has put over the cover since then stays."""
        before = self.before
        for name, value in self.over.items():
            if attributes.get(name) is not value:
                continue
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def cover(module: nn.Module, over: Mapping[str, Any]) -> Cover:
    """Give a module attributes that copies of it do not have, until :func:`uncover`."""
    attributes = vars(module)
    new = Cover(over, attributes)
    attributes.update(over)
    if _COVERS in attributes:
        attributes[_COVERS].append(new)
    else:
        attributes[_COVERS] = [new]
        attributes.setdefault(_GETSTATE, types.MethodType(_state, module))
    return new


def uncover(module: nn.Module, old: Cover) -> None:
    """Take one cover away; covers may go in any order."""
    attributes = vars(module)
    old.lift(attributes)
    covers = attributes.get(_COVERS, ())
    if len(covers) > 1:
        attributes[_COVERS] = [other for other in covers if other is not old]
    else:
        _forget(attributes)


def _state(module: nn.Module) -> Any:
    """The state of a covered module: that of its class, without the covers."""
    state = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    plain = dict(state)
    for each in reversed(vars(module).get(_COVERS, ())):
        each.lift(plain)
    _forget(plain)
    return plain


_state.__name__ = _GETSTATE  # by which a bound method is pickled: what is loaded has that of its class


def _forget(attributes: dict[str, Any]) -> None:
    attributes.pop(_COVERS, None)
    if getattr(attributes.get(_GETSTATE), "__func__", None) is _state:
        del attributes[_GETSTATE]
