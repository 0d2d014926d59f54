"""Floats that change are inputs of a graph; torch makes constants of more of them than it has to.

A pass of AOTAutograd puts tensor operations in the place of those that take such a float as a number. What it
has to leave is made a constant: the frame is traced once more, and each other value is a compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]  # it has no stubs
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd import graph_compile
from torch.fx import GraphModule, Node
from torch.utils._sympy.interp import handlers
from torch.utils._sympy.reference import TensorReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lightning_hotcompile.swap.tracing.changing_numbers import symbols_of
from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """A float of which the graph has no use is no constant: Python has compared it, or carries it through."""

    def replace(prior: Any, graph_module: GraphModule, shape_env: Any, fake_mode: Any) -> Any:
        known = TensorifyState.force_specializations
        unused = {str(each) for each in _floats(shape_env) - _used(graph_module)} - known
        known |= unused  # what is known to be a constant is not made one
        try:
            return prior(graph_module, shape_env, fake_mode)
        finally:
            known -= unused

    return [Override(graph_compile, "tensorify_python_scalars", replace)]


def beyond_tensors() -> dict[tuple[Any, str], Callable[..., NoReturn]]:
    """What torch has no tensor operation for (``step % 10``) stays a number: it would look for one and raise.

    By owner and name, for ``put_in_place``.
    """

    def missing(*_: Any) -> NoReturn:
        raise NotImplementedError

    names = {name for name in handlers().values() if not hasattr(TensorReferenceAnalysis, name)}
    return {(TensorReferenceAnalysis, name): missing for name in names}


@contextlib.contextmanager
def constants_of_one_frame() -> Iterator[None]:
    """Compile one frame; what it has made constants of is forgotten after it, unless it is traced once more.

    Torch keeps their names, and numbers of other frames have the same ones (that of what a call returned).
    """
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise
    except BaseException:
        TensorifyState.clear()
        raise
    TensorifyState.clear()


def _floats(shape_env: Any) -> set[sympy.Symbol]:
    """Those that are symbols still."""
    known, constants = shape_env.backed_var_to_val, shape_env.replacements
    return {each for each in known if symbol_is_type(each, SymT.FLOAT) and each not in constants}


def _used(graph_module: GraphModule) -> set[sympy.Symbol]:
    return {symbol for node in graph_module.graph.nodes for symbol in _symbols(node)}


def _symbols(node: Node) -> set[sympy.Symbol]:
    """Of the number that a node gives, or the dimensions of the tensor."""
    value = node.meta.get("val")
    return set().union(*map(symbols_of, (value, *getattr(value, "shape", ()))))
