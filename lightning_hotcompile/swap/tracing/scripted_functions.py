"""Functions of TorchScript that are not what their Python says are called by Python, at a graph break.

``torch.jit.script`` takes what a function calls as it is at that moment.
Dynamo traces the Python function in its place, with what those names mean now: where a file defines a helper
a second time below, compiled code would silently be that of the second one. A traced function has kept the
branches and the sizes of one call, which Dynamo would take anew. Both show in the function's graph: it is
compared with the one that TorchScript makes of the same Python today.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_CHECKED = "_hotcompile_scripted"
"""Where a graph in the making keeps what was found."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = variable.wrapper_obj
        if isinstance(function, torch.jit.ScriptFunction) and not _is_its_python(tx, function):
            end_graph(
                "function of TorchScript",
                f"call of {variable}",
                "It computes something else than its Python function, which would be traced in its place.",
                "Define what it calls once, or call the Python function.",
            )
        return prior(variable, tx, args, kwargs)

    return [Override(WrapperUserFunctionVariable, "call_function", call)]


def _is_its_python(tx: Any, function: Any) -> bool:
    """It is asked once for each graph, however often the step calls it."""
    known: dict[int, tuple[Any, bool]] = vars(tx.output).setdefault(_CHECKED, {})
    if id(function) not in known:
        known[id(function)] = function, is_as_written(function)  # kept, so that no other has its number
    return known[id(function)][1]


def is_as_written(function: Any) -> bool:
    """Whether TorchScript makes the same of its Python function today; in doubt it does not."""
    written = getattr(function, "_torchdynamo_inline", None)
    if not isinstance(written, types.FunctionType):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated
            again = torch.jit.script(_copy_of(written))
    except Exception:  # noqa: BLE001 - whatever its compiler raises
        return False
    return _text(again) == _text(function)


def _copy_of(function: types.FunctionType) -> types.FunctionType:
    """TorchScript knows what it has made of the function itself."""
    code, scope, closure = function.__code__, function.__globals__, function.__closure__
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _text(function: Any) -> str:
    return str(function.inlined_graph.str(False))
