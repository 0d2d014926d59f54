"""Attributes that are not there are guarded: a hook may have added one since.

Compiled code would go on with the fallback of a ``try``, or with what ``__getattr__`` of the user's gives in
its place. That is not asked by a guard: it may count, or make what it is asked for.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.variables import UserDefinedObjectVariable
from torch.nn import Module

from lightning_hotcompile.swap.tracing.overrides import Override, add_guard, traced_now

_GET_ATTRIBUTE = "generic_getattr" if hasattr(UserDefinedObjectVariable, "generic_getattr") else "var_getattr"
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_ABSENT = "_hotcompile_absent"
"""Where a graph in the making keeps which attributes are guarded."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def attribute(prior: Any, variable: Any, tx: Any, name: str) -> Any:
        is_absent = variable.source is not None and not _is_found(variable.value, name)
        if is_absent and _has_own_lookup(type(variable.value)):
            _guard_absent(variable.source, variable.value, name)
            is_absent = False
        try:
            return prior(variable, tx, name)
        except ObservedAttributeError:
            if is_absent:
                install_guard(_has_attribute(variable.source, name))
            raise

    return [Override(UserDefinedObjectVariable, _GET_ATTRIBUTE, attribute)]


def _is_found(value: Any, name: str) -> bool:
    """Whether an object, or its class, has an attribute; none of the user's code is asked."""
    if isinstance(value, Module) and any(name in (vars(value).get(each) or ()) for each in _OF_MODULES):
        return True
    return inspect.getattr_static(value, name, _OF_MODULES) is not _OF_MODULES


def _has_own_lookup(kind: type) -> bool:
    """Whether a function of the user's is asked; a dict and others of Python's have a slot of their own."""
    is_pythons = isinstance(getattr(kind, "__getattribute__", None), types.WrapperDescriptorType)
    return not is_pythons or getattr(kind, "__getattr__", None) not in (None, Module.__getattr__)


def _guard_absent(source: Any, value: Any, name: str) -> None:
    guarded = vars(traced_now().output).setdefault(_ABSENT, set())
    if (source.name, name) in guarded:  # it may be read in each pass of a loop
        return
    guarded.add((source.name, name))
    words = f"no {name} in {source.name}"
    if not isinstance(value, dict):
        add_guard(source, lambda value: not _is_found(value, name), words)
        return
    # Of a dict Dynamo guards keys and items by a manager that takes no question, so both places are asked.
    add_guard(TypeSource(source), lambda kind: not any(name in vars(each) for each in kind.__mro__), words)
    if type(value).__dictoffset__:
        add_guard(AttrSource(source, "__dict__"), lambda attributes: name not in attributes, words)


def _has_attribute(source: Any, name: str) -> Any:
    """A guard on whether what has this source has an attribute."""
    if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        return source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name))
    return AttrSource(source, name).make_guard(GuardBuilder.HASATTR)  # before torch 2.13
