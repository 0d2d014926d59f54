"""Functions behind ``functools.cache`` give compiled code what their cache holds.

Dynamo looks past the cache: the body would run in each step, and what is to be made once (random features,
a table) be made anew. So what the cache holds when the step is traced is a part of the graph, and a guard
looks before each step whether it still holds that. What it does not hold is made where the step calls for it:
there the graph ends.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch._dynamo.source import GlobalWeakRefSource, is_from_global_source
from torch._dynamo.variables import TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override, add_guard

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WITH_A_CACHE = type(functools.cache(len))
_PREFIX = "__hotcompile_cached"
_ASKED = "_hotcompile_cached"
"""Where a graph in the making keeps what was asked, and so is guarded."""

_Question = tuple[tuple[Any, ...], dict[str, Any]]


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = _answer(variable, tx, args, kwargs)
        return prior(variable, tx, args, kwargs) if found is None else found

    return [Override(WrapperUserFunctionVariable, "call_function", call)]


def is_held(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether it has a cache, and that holds what a call gives, which then runs nothing."""
    return _is_cached(function) and _key_of(function, (args, named)) is not None


def _answer(variable: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker | None:
    """What a call gives, ``None`` where that is not known, or may not be relied on."""
    function, source = variable.wrapper_obj, variable.source
    if type(variable) is not WrapperUserFunctionVariable or source is None or not _is_cached(function):
        return None
    question = _question(args, kwargs)
    key = None if question is None else _key_of(function, question)
    if question is None or key is None:
        return None
    answer = function(*question[0], **question[1])
    if not _is_constant(answer) and not (_holds_tensors(answer) and is_from_global_source(source)):
        return None  # Python may change it in mid-step; each of equal modules has one, and code of its own
    _guard(tx, source, question, key, answer)
    return _known(tx, answer)


def _is_cached(function: Any) -> bool:
    """Whether it is one of the user's with a cache of Python's in front of it."""
    module = getattr(getattr(function, "__wrapped__", None), "__module__", None) or ""
    return isinstance(function, _WITH_A_CACHE) and module.partition(".")[0] != "torch"


def _question(args: Any, kwargs: Any) -> _Question | None:
    """What the function is called with, if those are plain values, which Dynamo guards."""
    if not all(each.is_python_constant() for each in (*args, *kwargs.values())):
        return None
    values = tuple(each.as_python_constant() for each in args)
    named = {name: each.as_python_constant() for name, each in kwargs.items()}
    return (values, named) if all(map(_is_constant, (*values, *named.values()))) else None


def _held_by(function: Any) -> dict[Any, Any]:
    """The cache, by keys of Python's own making; empty where calls may change what it holds.

    A call for what it holds runs nothing. But that is then what was used last: of a full one another goes.
    """
    info = function.cache_info()
    found = [each for each in gc.get_referents(function) if type(each) is dict and each is not vars(function)]
    held: dict[Any, Any] = found[0] if len(found) == 1 else {}
    return held if len(held) < 2 or info.maxsize is None or info.currsize < info.maxsize else {}


def _key_of(function: Any, question: _Question) -> tuple[Any] | None:
    """By what the cache holds the answer, in a tuple; ``None`` if it does not hold it.

    Python puts a mark of its own before what is given by name, and the types after all where they count.
    """
    args, named = question
    one = len(args) == 1 and not named and type(args[0]) in (int, str)
    wanted: Any = args[0] if one else args
    held = _held_by(function)
    if function.cache_parameters()["typed"]:
        return None
    if not named:
        return (wanted,) if wanted in held else None
    items = tuple(each for item in named.items() for each in item)
    n = len(args)
    alike = (
        k for k in list(held) if type(k) is tuple and len(k) == n + 1 + len(items) and type(k[n]) is object
    )
    return next(((k,) for k in alike if _are_same(k[:n], args) and _are_same(k[n + 1 :], items)), None)


def _are_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return found == wanted and all(type(a) is type(b) for a, b in zip(found, wanted, strict=True))


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS and not (isinstance(value, float) and math.isnan(value))


def _holds_tensors(value: Any) -> bool:
    if type(value) is tuple:
        return all(_holds_tensors(each) or _is_constant(each) for each in value)
    return type(value) is torch.Tensor


def _known(tx: Any, answer: Any) -> VariableTracker:
    """Tensors are found by weak references: what a cache gives up is not kept."""
    if type(answer) is tuple and not _is_constant(answer):
        return TupleVariable([_known(tx, each) for each in answer])
    source = None
    if not _is_constant(answer):
        source = GlobalWeakRefSource(tx.store_global_weakref_by_id(_PREFIX, answer))
    known: VariableTracker = VariableTracker.build(tx, answer, source)
    return known


def _seen(answer: Any) -> Any:
    """By which it is told again, without being kept."""
    if type(answer) is tuple:
        return tuple(map(_seen, answer))
    return weakref.ref(answer) if isinstance(answer, torch.Tensor) else answer


def _is_it(now: Any, seen: Any) -> bool:
    if type(seen) is tuple:
        return type(now) is tuple and len(now) == len(seen) and all(map(_is_it, now, seen))
    return now is (seen() if isinstance(seen, weakref.ref) else seen)


def _guard(tx: Any, source: Any, question: _Question, key: tuple[Any], answer: Any) -> None:
    """It is asked once for each graph, however often the step calls it."""
    asked: set[Hashable] = vars(tx.output).setdefault(_ASKED, set())
    named = source.name, repr(question)
    if named in asked:
        return
    asked.add(named)
    seen = _seen(answer)

    def holds_it(function: Any) -> bool:
        return key[0] in _held_by(function) and _is_it(function(*question[0], **question[1]), seen)

    add_guard(source, holds_it, f"{source.name} gives for {question} what its cache has held")
