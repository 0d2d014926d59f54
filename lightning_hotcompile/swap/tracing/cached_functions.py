"""Functions behind ``functools.cache`` give compiled code what their cache holds.

Dynamo looks past the cache: the body would run in each step, and what is to be made once (random features,
a table) be made anew. So the function itself is asked while the step is traced, and by a guard before each
step, as eager code would ask it. Where that cannot be done, the graph ends at the call.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalSource, is_from_global_source
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PREFIX = "__hotcompile_cached"
_ASKED = "_hotcompile_cached"
"""Where a graph in the making keeps what was asked, and so is guarded."""

_Question = tuple[tuple[Any, ...], dict[str, Any]]


def asked_by_guards() -> list[Override]:
    """What Dynamo does otherwise."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = _answer(variable, tx, args, kwargs)
        return prior(variable, tx, args, kwargs) if found is None else found

    return [Override(WrapperUserFunctionVariable, "call_function", call)]


def _answer(variable: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker | None:
    """What a call gives, ``None`` where that is not known, or may not be relied on."""
    function, source = variable.wrapper_obj, variable.source
    if type(variable) is not WrapperUserFunctionVariable or source is None or not is_cached(function):
        return None
    question = _question(args, kwargs)
    if question is None or not function.cache_info().currsize:  # what it does when it is called first
        return None
    try:
        answer = function(*question[0], **question[1])
    except Exception:  # noqa: BLE001  # of the user's, and to be raised where it is called
        return None
    constant = _is_constant(answer)
    if not constant and not (_holds_tensors(answer) and is_from_global_source(source)):
        return (
            None  # what Python changes in mid-step; or each of equal modules has its own, and code of its own
        )
    _guard(tx, source, question, answer)
    held = None if constant else GlobalSource(tx.output.install_global_by_id(_PREFIX, answer))
    known: VariableTracker = VariableTracker.build(tx, answer, held)
    return known


def is_cached(function: Any) -> bool:
    """Whether it is one of the user's with a cache of Python's in front of it."""
    wrapped = getattr(function, "__wrapped__", None)
    module = getattr(wrapped, "__module__", None) or ""
    return hasattr(function, "cache_info") and module.partition(".")[0] != "torch"


def _question(args: Any, kwargs: Any) -> _Question | None:
    """What the function is called with, if those are plain values, which Dynamo guards."""
    if not all(each.is_python_constant() for each in (*args, *kwargs.values())):
        return None
    values = tuple(each.as_python_constant() for each in args)
    named = {name: each.as_python_constant() for name, each in kwargs.items()}
    return (values, named) if all(map(_is_constant, (*values, *named.values()))) else None


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS and not (isinstance(value, float) and math.isnan(value))


def _holds_tensors(value: Any) -> bool:
    if type(value) is tuple:
        return all(_holds_tensors(each) or _is_constant(each) for each in value)
    return type(value) is torch.Tensor


def _guard(tx: Any, source: Any, question: _Question, answer: Any) -> None:
    """It is asked once for each graph, however often the step calls it."""
    asked: set[Hashable] = vars(tx.output).setdefault(_ASKED, set())
    key = source.name, repr(question)
    if key in asked:
        return
    asked.add(key)
    constant = _is_constant(answer)

    def gives_the_same(function: Any) -> bool:
        try:
            now = function(*question[0], **question[1])
        except Exception:  # noqa: BLE001  # eager code raises it
            return False
        return now is answer or (constant and type(now) is type(answer) and bool(now == answer))

    def guard_answer(builder: GuardBuilder, guard: Any) -> None:
        words = [f"{source.name} gives for {question} what its cache has held"]
        builder.get_guard_manager(guard).add_lambda_guard(gives_the_same, words, guard.user_stack)

    install_guard(source.make_guard(guard_answer))
