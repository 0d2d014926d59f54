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
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.resume_execution import ContinueExecutionCache

from lightning_hotcompile.swap.overrides import Override

_TORCH = str(Path(torch.__file__).parent) + os.sep
_BY_OPERATIONS = (RuntimeError, IndexError, AssertionError)
"""What operations raise by what their tensors hold; errors of linear algebra and of memory are such, too.

``assert`` on a tensor is an operation of the graph.
"""


def errors_stay_caught(break_the_graph: Callable[..., Any]) -> list[Override]:
    """What Dynamo does otherwise.

    Args:
        break_the_graph: Dynamo's function that ends a graph, with a reason in its four arguments.
    """

    def create_proxy(prior: Any, output: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind.startswith("call_"):
            for frame in _frames(output.current_tx):
                if is_caught(frame.f_code, frame.lineno, frame.f_globals):
                    break_the_graph(
                        gb_type="operation whose errors are caught",
                        context=f"{frame.f_code.co_name}, line {frame.lineno}",
                        explanation="Its error would not come to the handler of the function.",
                        hints=[],
                    )
        return prior(output, kind, *args, **kwargs)

    return [
        Override(
            OutputGraph, "create_proxy", create_proxy, translator=lambda output, *_, **__: output.root_tx
        )
    ]


def _frames(translator: Any) -> Iterator[Any]:
    """That is traced now, and those that it was called from."""
    while translator is not None:
        yield translator
        translator = getattr(translator, "parent", None)


def is_caught(code: types.CodeType, line: int, namespace: Mapping[str, Any]) -> bool:
    """Whether a line of a function lies in a ``try`` that catches what an operation may raise, and goes on.

    Its source is read: where there is none, no handler is seen. Torch's own functions do not count.

    Args:
        code: of the function.
        line: in its file.
        namespace: its globals, where the names of errors are looked up; one that is not there may be any.
    """
    code = _as_written(code)
    if not _may_have_handlers(code) or code.co_filename.startswith(_TORCH):
        return False
    return any(first <= line <= last and _may_catch(kind, namespace) for first, last, kind in _caught(code))


def _as_written(code: types.CodeType) -> types.CodeType:
    """The user's function, of which Dynamo has made one that goes on after a graph break."""
    made = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if made is None else made.code


def _may_have_handlers(code: types.CodeType) -> bool:
    return sys.version_info < (3, 11) or bool(code.co_exceptiontable)


@functools.lru_cache(maxsize=4096)
def _caught(code: types.CodeType) -> tuple[tuple[int, int, ast.expr | None], ...]:
    """First and last line of each ``try``, and what a handler that goes on names: ``None`` if all."""
    try:
        lines, first = inspect.getsourcelines(code)
        # Not dedented: a comment, or a line of a string, may begin at the margin.
        tree = ast.parse("if True:\n" + "".join(lines) if lines[0][:1].isspace() else "\n" + "".join(lines))
    except Exception:  # noqa: BLE001  # no source, or lines that are no statement by themselves (a lambda)
        return ()
    above = first - 2
    return tuple(
        (above + node.body[0].lineno, above + (node.body[-1].end_lineno or sys.maxsize), handler.type)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if _goes_on(handler)
    )


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the function may go on after it, or return: not where it raises in the end."""
    leaves = (ast.Return, ast.Continue, ast.Break)
    return not isinstance(handler.body[-1], ast.Raise) or any(
        isinstance(node, leaves) for statement in handler.body for node in ast.walk(statement)
    )


def _may_catch(kind: ast.expr | None, namespace: Mapping[str, Any]) -> bool:
    if kind is None:
        return True
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(_is_of_operations(error) for name in names for error in _found(name, namespace))


def _found(name: ast.expr, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """The class of errors that a name or ``module.name`` stands for; ``Exception`` if that cannot be told."""
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
