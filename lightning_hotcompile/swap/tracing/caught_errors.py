"""Operations whose errors the user's code catches are left to Python, at the price of a graph break.

Whether a matrix has a Cholesky factor, an index is in range or memory suffices shows when the operation runs.
Dynamo traces it with tensors that have no data, on which it never fails: the handler is no part of the graph,
and the error comes from the compiled code as a whole, outside of the ``try``. So a step that skips such a
batch, or goes another way, would end the training. Dynamo takes up no function again within a ``try``: all of
it runs eagerly, and what it calls is compiled by itself.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import itertools
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.plan.source import parsed
from lightning_hotcompile.swap.tracing.overrides import Override, as_written, end_graph

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIGHTNING = frozenset(["lightning", "pytorch_lightning", "lightning_fabric"])
_BETWEEN = frozenset(["torch", "lightning_hotcompile"])
"""What may lie between Lightning and a step that is traced."""

_LOADS = re.compile("LOAD_CONST|LOAD_SMALL_INT|RETURN_CONST")
_BY_OPERATIONS = (RuntimeError, IndexError, AssertionError)
"""What operations raise by what their tensors hold; errors of linear algebra and of memory are such, too.

``assert`` on a tensor is an operation of the graph.
"""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def create_proxy(prior: Any, output: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        frame = _catching(output) if kind.startswith("call_") else None
        if frame is not None:
            end_graph(
                "operation whose errors are caught",
                f"{frame.f_code.co_name}, line {frame.lineno}",
                "Its error would not come to the handler of the function.",
            )
        return prior(output, kind, *args, **kwargs)

    return [Override(OutputGraph, "create_proxy", create_proxy)]


def _catching(output: Any) -> Any | None:
    """The translator of the function that would catch an error of the operation that is traced now.

    Or that would raise another one in its place, for functions that have called this code. That is the
    function with the operation, or one that it was called from; ``None`` if no function would. Of a generator
    it is the one that asks it for more, and not the one that has made it.
    """
    raised, renaming = Raised.BY_OPERATION, None
    for translator in reversed(output._current_tx):
        managers = translator.active_generic_context_managers
        if any(raised is Raised.ANY or _goes_on_after(output.side_effects, each) for each in managers):
            return translator
        raised = passed_on(translator.f_code, translator.lineno, translator.f_globals, raised)
        if raised is Raised.CAUGHT:
            return translator
        renaming = renaming or (translator if raised is Raised.ANY else None)
    return renaming if renaming is not None and _was_called_by_the_users() else None


def _was_called_by_the_users() -> bool:
    """Whether the frame that is traced may have been called by code of the user's, which handlers may be in.

    Lightning calls a step, and goes on after no error. All aggregations of PyG raise an index that is out of
    range as an error of another kind, which ends the training as the first one would.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _LIGHTNING:
            return False
        if package not in _BETWEEN:
            return True
        frame = frame.f_back
    return True


def _goes_on_after(effects: Any, manager: Any) -> bool:
    """Whether a context manager of the user's may swallow an error of what is within it."""
    manager = getattr(manager, "cm_vt", manager)  # torch's own, with another variable around it
    made, kind = manager.cm_obj, type(manager.cm_obj)

    def known(name: str) -> Any:
        is_new = effects.has_pending_mutation_of_attr(manager, name)
        return effects.load_attr(manager, name) if is_new else getattr(made, name, None)

    if issubclass(kind, contextlib.suppress):
        errors = known("_exceptions")
        if isinstance(errors, VariableTracker):
            errors = errors.as_python_constant() if errors.is_python_constant() else (Exception,)
        return any(map(_is_of_operations, errors))
    if issubclass(kind, contextlib._GeneratorContextManager):
        translator = getattr(known("gen"), "inline_tracer", None)
        return translator is None or _passed_by(translator) is not Raised.BY_OPERATION
    code = getattr(kind.__exit__, "__code__", None)
    return code is None or (not code.co_filename.startswith(_TORCH) and _returns_something(code))


def _passed_by(translator: Any) -> Raised:
    return passed_on(translator.f_code, translator.lineno, translator.f_globals)


@functools.lru_cache(maxsize=256)  # asked at each operation within
def _returns_something(code: types.CodeType) -> bool:
    """Whether a function has another outcome than a constant that is false."""
    instructions = list(dis.get_instructions(code))
    for before, each in itertools.pairwise(instructions):
        returned = before if each.opname == "RETURN_VALUE" else each
        is_the_end = each.opname in ("RETURN_VALUE", "RETURN_CONST")
        if is_the_end and (not _LOADS.fullmatch(returned.opname) or returned.argval):
            return True
    return False


class Raised(Enum):
    """The error of an operation, on its way through handlers."""

    BY_OPERATION = auto()
    """As the operation has raised it."""

    ANY = auto()
    """A handler may have raised another one in its place."""

    CAUGHT = auto()
    """A handler goes on."""


def passed_on(
    code: types.CodeType, line: int, namespace: Mapping[str, Any], raised: Raised = Raised.BY_OPERATION
) -> Raised:
    """What becomes of an error in a line of a function, for those that called it.

    Its source is read: where there is none, no handler is seen. Torch's own functions do not count.

    Args:
        code: of the function.
        line: in its file.
        namespace: its globals, where the names of errors are looked up; one that is not there may be any.
        raised: the error as it comes to that line.
    """
    code = as_written(code)
    if not _may_have_handlers(code) or code.co_filename.startswith(_TORCH):
        return raised
    for guarded in _guarded(code):
        if guarded.first <= line <= guarded.last:
            outcomes = {h.outcome for h in guarded.handlers if _may_catch(h, namespace, raised)}
            if Raised.CAUGHT in outcomes:
                return Raised.CAUGHT
            raised = Raised.ANY if Raised.ANY in outcomes else raised
    return raised


def _may_have_handlers(code: types.CodeType) -> bool:
    return sys.version_info < (3, 11) or bool(code.co_exceptiontable)


@dataclass(frozen=True, kw_only=True)
class _Handler:
    kind: ast.expr | None
    """What it names: ``None`` if all errors."""

    outcome: Raised
    by: ast.expr | None = None
    """What makes a context manager, which is a handler only if that is ``contextlib.suppress``."""


@dataclass(frozen=True, kw_only=True)
class _Guarded:
    first: int
    last: int
    handlers: tuple[_Handler, ...]


_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
"""``except*`` has a node of its own, from Python 3.11 on."""

_LEAVES = (ast.Return, ast.Continue, ast.Break)


@functools.lru_cache(maxsize=4096)
def _guarded(code: types.CodeType) -> tuple[_Guarded, ...]:
    """Lines with handlers around them, the innermost first."""
    found = parsed(code)
    if found is None:
        return ()
    tree, above = found
    return tuple(
        _Guarded(
            first=above + node.body[0].lineno,
            last=above + (node.body[-1].end_lineno or sys.maxsize),
            handlers=tuple(_handlers(node)),
        )
        for node in reversed(list(ast.walk(tree)))  # which goes by depth
        if isinstance(node, (*_TRIES, ast.With))
    )


def _handlers(node: ast.Try | ast.With) -> Iterator[_Handler]:
    if isinstance(node, _TRIES):
        for handler in node.handlers:
            yield _Handler(kind=handler.type, outcome=_outcome(handler))
        if any(isinstance(n, _LEAVES) for statement in node.finalbody for n in ast.walk(statement)):
            yield _Handler(kind=None, outcome=Raised.CAUGHT)  # an error goes no further than there
        return
    for item in node.items:
        if isinstance(call := item.context_expr, ast.Call):
            for kind in call.args:
                yield _Handler(kind=kind, outcome=Raised.CAUGHT, by=call.func)


def _outcome(handler: ast.ExceptHandler) -> Raised:
    """Caught where the function may go on after it, or return: not where it raises in the end."""
    within = [node for statement in handler.body for node in ast.walk(statement)]
    if not isinstance(handler.body[-1], ast.Raise) or any(isinstance(node, _LEAVES) for node in within):
        return Raised.CAUGHT
    raises = [node.exc for node in within if isinstance(node, ast.Raise)]
    return Raised.ANY if any(error is not None for error in raises) else Raised.BY_OPERATION


def _may_catch(handler: _Handler, namespace: Mapping[str, Any], raised: Raised) -> bool:
    if handler.by is not None and contextlib.suppress not in _found(handler.by, namespace):
        return False
    if handler.kind is None or raised is Raised.ANY:
        return True
    names = handler.kind.elts if isinstance(handler.kind, ast.Tuple) else [handler.kind]
    return any(_is_of_operations(error) for name in names for error in _found(name, namespace))


def _found(name: ast.expr, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """The class that a name or ``module.name`` stands for, or all of a tuple; ``Exception`` if unknown."""
    path: list[str] = []
    while isinstance(name, ast.Attribute):
        path.insert(0, name.attr)
        name = name.value
    try:
        found = (namespace if name.id in namespace else vars(builtins))[name.id]  # type: ignore[attr-defined]
        for part in path:
            found = getattr(found, part)
    except Exception:  # noqa: BLE001  # a call, a local variable, a module's __getattr__
        found = Exception
    yield from found if isinstance(found, tuple) else (found,)


def _is_of_operations(error: Any) -> bool:
    if not isinstance(error, type):
        return True
    of_torch = str(error.__module__).partition(".")[0] == "torch" and issubclass(error, _BY_OPERATIONS)
    return of_torch or any(issubclass(each, error) for each in _BY_OPERATIONS)
