"""The step function of a module: finding it, making a replacement look like it, and putting it back."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from lightning_hotcompile.swap.own_thread import is_traced_here


def source_of(root: nn.Module, name: str) -> Any:
    """What a method is made of: the same until it is replaced; its bound form is a new one each time."""
    source = vars(root).get(name, inspect.getattr_static(type(root), name))
    return source.__func__ if is_method_of(root, source) else source


def is_method_of(module: nn.Module, step: Any) -> bool:
    """Whether it is a function that is bound to the module."""
    return isinstance(step, types.MethodType) and step.__self__ is module


def looking_like(step: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, with the name and the parameters of a step.

    Lightning looks for parameters behind one decorator and no more, so ours does not count as another one.
    """
    functools.update_wrapper(ours, step)
    vars(ours)["__wrapped__"] = getattr(step, "__wrapped__", step)
    return ours


def integer_sources(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Dynamo's names of the integer arguments (``batch_idx``), as patterns.

    They have another name in the user's own frame, which is compiled by itself after a graph break.
    """
    try:
        parameters = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = [f"L['args'][{i}]" for i, a in enumerate(args) if type(a) is int]
    names += [f"L['kwargs']['{k}']" for k, a in kwargs.items() if type(a) is int]
    named = {**dict(zip(parameters, args, strict=False)), **kwargs}
    names += [f"L['{k}']" for k, a in named.items() if type(a) is int]
    return [re.escape(n) + "$" for n in names]


_STANDS_FOR = "_hotcompile_stands_for"


class InPlace(Protocol):
    """What is asked of a region here."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model is changed now."""


def marked(ours: Callable[..., Any], module: nn.Module, step: Any, region: InPlace) -> Callable[..., Any]:
    """Ours, which tells :func:`give_back` for which step of the module it stands."""
    vars(ours)[_STANDS_FOR] = ours, module, step, region
    return ours


def give_back(module: nn.Module, name: str) -> None:
    """Put a step in its place again, where ours stands though it was taken out.

    Whoever replaces a step for a while keeps what was there, which may be ours, and puts it back later.
    """
    while not is_traced_here() and (step := _stood_for(module, vars(module).get(name))) is not None:
        vars(module)[name] = step


def _stood_for(module: nn.Module, found: Any) -> Any:
    function = getattr(found, "__func__", found)
    mark = getattr(function, "__dict__", {}).get(_STANDS_FOR)
    if mark is None:
        return None
    ours, root, step, region = mark
    # A wrapper of somebody's has the marks of what it is around, and a copy of the module those of ours.
    return step if ours is function and root is module and not region.is_in_place else None


def ignoring_self(bound: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the module before its arguments, from one without."""

    def unbound(_: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return unbound


class ClassMethods:
    """The methods that a class has when this is made, to tell later whether any of them was replaced.

    Args:
        kind: the class.
        names: of the methods.
    """

    def __init__(self, kind: type, names: Sequence[str]) -> None:
        self._kind = kind
        self._names = names
        self._read = [getattr(kind, name) for name in names]
        self._stored = [_of_class(kind, name) for name in names]

    def are_those_of(self, kind: type) -> bool:
        """Whether ``kind`` is that class, and none of the methods was replaced since. Asked in each step."""
        if kind is not self._kind:
            return False
        if [getattr(kind, name) for name in self._names] == self._read:
            return True
        # a descriptor may make a new object each time that it is read
        return [_of_class(kind, name) for name in self._names] == self._stored


def method_of_class(module: nn.Module, name: str) -> Callable[..., Any]:
    """The method that a module has of its class, whatever attribute of its own stands over it."""
    found = _of_class(type(module), name)
    bound: Callable[..., Any] = found.__get__(module, type(module)) if hasattr(found, "__get__") else found
    return bound


def _of_class(kind: type, name: str) -> Any:
    for each in kind.__mro__:
        if name in vars(each):
            return vars(each)[name]
    return None
