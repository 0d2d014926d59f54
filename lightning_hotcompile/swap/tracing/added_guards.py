"""Guards that Dynamo leaves out: on what is in no dict and no object, on orders, and on which object it was.

Compiled code would go on without a key that a later batch has (``batch.pop("labels")`` and then
``batch.get("mask")``), with the fallback of a ``try`` around a missing key that a hook has added since,
through keyword arguments in the order that they had while it was traced, down the one branch of
``if self.current is self.first``, or through a method that its class has no longer.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, TypeDictSource, is_from_local_source
from torch._dynamo.variables import (  # type: ignore[attr-defined]  # SetVariable has moved in torch 2.13
    BaseListVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SetVariable,
    TensorVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
    builder,
    builtin,
)
from torch._dynamo.variables.misc import ObjectVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.torch import BaseTorchVariable
from torch._dynamo.variables.user_defined import FrozenDataClassVariable
from torch.nn import Module, Parameter

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph, traced_now

_PROTOCOL = "torch._dynamo.variables.object_protocol"  # from torch 2.13 on
_REMOVE, _LOOKS_UP = ("pop", "clear"), ("get", "pop", "setdefault")
_JOINS = ("__or__", "__ror__", "__ior__")  # torch before 2.13 guards one of the two dicts
_ABSENT_KEY = "getitem_const_raise_exception_if_absent"
_SOURCE_IN_CLASS = "get_source_by_walking_mro"

_IDENTITY, _SAME = "vt_identity_compare", "make_dupe_guard"
_COMPARED = hasattr(builtin, _IDENTITY)
"""Whether torch has one function for it. ``is`` has its name in ``builtin``, ``==`` and ``in`` elsewhere."""

_OBJECTS = (UserDefinedObjectVariable, UserFunctionVariable, ObjectVariable)
_KEYS = (*_OBJECTS, UserDefinedClassVariable, BaseTorchVariable)
_CONTAINERS = (ConstDictVariable, SetVariable, BaseListVariable)

_ALIASES = "_hotcompile_aliases"
"""Where a graph in the making keeps which other name an object has, by the one that it goes by."""

_CALLS = ("__call__", "_call_impl")
"""What Dynamo goes past to the forward of a module."""

_METHODS = "_hotcompile_methods"
"""Where it keeps the methods that are guarded, by their class and name."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def guard_key(variable: Any, key: Any) -> None:
        """Which object it was that a dict or set does not have; of functions Dynamo guards the code alone."""
        key = key.realize() if isinstance(key, LazyVariableTracker) else key
        if isinstance(key, BaseListVariable):
            for item in key.items:
                guard_key(variable, item)
        elif _is_method(key):  # each read of one makes another
            names = ("__self__", "__func__") if key.source else ()
            for part in names:
                install_guard(AttrSource(key.source, part).make_guard(GuardBuilder.ID_MATCH))
        elif isinstance(key, NumpyNdarrayVariable) or (_has_own_hash(key) and not _is_guarded_by_value(key)):
            end_graph(
                "lookup of an object that is compared by its value",
                f"{key}",
                "Dynamo looks for the same object, and has an array for a number of numpy's.",
            )
        elif key.source and (isinstance(key, UserFunctionVariable) or _is_forgotten(variable, key)):
            install_guard(key.source.make_guard(GuardBuilder.ID_MATCH))

    def dict_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _REMOVE and variable.source is not None:
            variable.install_dict_keys_match_guard()  # which is taken to be there for what comes after it
        for each in (variable, *args[0]) if name in _JOINS else ():
            if isinstance(each, ConstDictVariable) and each.source is not None:
                each.install_dict_keys_match_guard()
        if name in _LOOKS_UP and args and args[0]:
            guard_key(variable, args[0][0])
        return prior(variable, tx, name, *args, **kwargs)

    def keys_match(prior: Any, variable: Any) -> Any:
        """The order as well."""
        if variable.source is not None and is_from_local_source(variable.source):
            traced_now().output.guard_on_key_order.add(variable.source)
        return prior(variable)

    def absent_key(prior: Any, variable: Any, tx: Any, key: Any) -> Any:
        if variable.source is not None and key not in variable:
            variable.install_dict_contains_guard(tx, [key])
        else:
            guard_key(variable, key)
        return prior(variable, tx, key)

    def looked_up(prior: Any, variable: Any, tx: Any, keys: Any) -> Any:
        prior(variable, tx, keys)
        guard_key(variable, keys[0])

    def guard_compared(left: Any, right: Any) -> None:
        if _is_method(left) and _is_method(right):  # two that are equal are two to Dynamo
            end_graph(
                "comparison of methods",
                f"{left} {right}",
                "Each read of a method makes a new one, and two of the same object are equal.",
            )
        for source in _names_of_compared(left, right):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))

    def identity(prior: Any, left: Any, right: Any) -> Any:
        """Asked by ``==`` and look-ups, which go on to the values where these are two."""
        if left is right or not (_is_compared_by_value(left) and _is_compared_by_value(right)):
            guard_compared(left, right)
        return prior(left, right)

    def is_the_same(prior: Any, left: Any, right: Any) -> Any:
        if all(isinstance(each, _CONTAINERS) and each.source for each in (left, right)) and (
            left is not right or _other_name(left) is not None
        ):
            end_graph(
                "comparison of containers by identity",
                f"{left} {right}",
                "Dynamo looks at what a dict, list, tuple or set holds, and not at which it is.",
            )
        guard_compared(left, right)
        return prior(left, right)

    def example_value(prior: Any, node: Any) -> Any:
        """Of a tensor whose identity is asked; which parameter it was Dynamo does not guard."""
        argument = node.meta.get("grapharg")
        if argument is not None and argument.source and isinstance(argument.example, Parameter):
            install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))
        return prior(node)

    def same_object(prior: Any, source: Any, known_by: Any) -> Any:
        """Dynamo has no guard for one that is in the step's reach and in a module of Python's as well."""
        guard = prior(source, known_by)
        if guard is None and known_by and known_by != source:
            vars(traced_now().output).setdefault(_ALIASES, {})[known_by] = source
        return guard

    def class_method(prior: Any, variable: Any, *args: Any) -> Any:
        """As it stands in its class; that no object has its own is what Dynamo guards."""
        source, name, kind = prior(variable, *args), args[-1], type(variable.value)
        guarded = vars(traced_now().output).setdefault(_METHODS, set())
        if (kind, name) in guarded or _is_of_torch(kind):
            return source
        guarded.add((kind, name))  # once for all objects of the class
        if name == "forward" and issubclass(kind, Module):
            for call in (each for each in _CALLS if getattr(kind, each) is getattr(Module, each)):
                of_all = prior(variable, *args[:-1], call)
                install_guard(_without_key(TypeDictSource(variable.cls_source), call))
                if (Module, call) not in guarded:
                    install_guard(of_all.make_guard(GuardBuilder.CLOSURE_MATCH))
                guarded.add((Module, call))
        owner = next(each for each in kind.__mro__ if name in vars(each))
        if isinstance(vars(owner)[name], (types.FunctionType, classmethod)):
            if owner is not kind:
                install_guard(_without_key(TypeDictSource(variable.cls_source), name))
            if not _is_of_torch(owner):
                install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
        return source

    found = [
        Override(builtin, _IDENTITY, is_the_same),
        Override(sys.modules.get(_PROTOCOL, builtin), _IDENTITY, identity),
        Override(builtin, "extract_fake_example_value", example_value),
        *([Override(builder, _SAME, same_object)] if _COMPARED else []),
        Override(ConstDictVariable, "call_method", dict_method),
        Override(ConstDictVariable, "install_dict_keys_match_guard", keys_match),
        Override(ConstDictVariable, _ABSENT_KEY, absent_key),
        Override(ConstDictVariable, "install_dict_contains_guard", looked_up),
        Override(SetVariable, "install_set_contains_guard", looked_up),
        Override(UserDefinedObjectVariable, _SOURCE_IN_CLASS, class_method),
    ]
    return [each for each in found if hasattr(each.owner, each.name)]  # torch 2.11 has none for identity


def _names_of_compared(left: Any, right: Any) -> list[Any]:
    """Where two things of one kind come from that are there before the step."""
    if not all(isinstance(each, _OBJECTS) and each.source for each in (left, right)):
        return []  # one is made in the step, or is a value, which is guarded
    if left is right:
        other = _other_name(left)
        return [left.source, other] if other is not None else []
    same_kind = type(_value_of(left)) is type(_value_of(right))  # else a type tells them apart
    return [left.source, right.source] if same_kind else []


def _other_name(variable: Any) -> Any:
    """By which an object is known that Dynamo has no guard for."""
    return vars(traced_now().output).get(_ALIASES, {}).get(variable.source)


def _is_forgotten(variable: Any, key: Any) -> bool:
    if variable.source is None and not variable.items:
        return False  # made in the step, and nothing is in it yet: no object is, whichever it is
    is_one = isinstance(key, _KEYS) or _is_parameter(key)
    return is_one and not _has_own_hash(key) and key not in variable


def _has_own_hash(variable: Any) -> bool:
    """Whether an object is looked up by its value; one that is equal may be another one each time."""
    hashes: Any = getattr(type(_value_of(variable)), "__hash__", None)
    return isinstance(variable, UserDefinedObjectVariable) and hashes is not object.__hash__


def _is_guarded_by_value(variable: Any) -> bool:
    return isinstance(variable, FrozenDataClassVariable) or isinstance(variable.value, (tuple, enum.Enum))


def _is_compared_by_value(variable: Any) -> bool:
    """Whether its value is guarded, and is all that ``==`` looks at."""
    equals: Any = getattr(type(_value_of(variable)), "__eq__", None)
    is_value = isinstance(variable, UserDefinedObjectVariable) and _is_guarded_by_value(variable)
    return is_value and equals is not object.__eq__


def _is_parameter(variable: Any) -> bool:
    kind = getattr(variable, "class_type", None)
    return isinstance(variable, TensorVariable) and isinstance(kind, type) and issubclass(kind, Parameter)


def _is_method(variable: Any) -> bool:
    return isinstance(variable, UserMethodVariable) or isinstance(_value_of(variable), types.MethodType)


def _value_of(variable: Any) -> Any:
    return variable.value if isinstance(variable, UserDefinedObjectVariable) else variable


def _is_of_torch(kind: type) -> bool:
    """Whether it is a class of torch's, whose methods nobody replaces in mid-run."""
    return kind.__module__.partition(".")[0] == "torch"


def _without_key(source: Any, key: str) -> Any:
    """A guard on the absence of a key."""
    if hasattr(GuardBuilder, "DICT_NOT_CONTAINS"):
        return source.make_guard(functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=key))
    return source.make_guard(functools.partial(GuardBuilder.DICT_CONTAINS, key=key, invert=True))
