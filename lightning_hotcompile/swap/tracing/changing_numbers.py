"""Python numbers that change: what follows a schedule, or was drawn, is no constant of each step's code.

Dynamo has a symbol for a number that has changed. Where it cannot compute with one it takes the result for
a constant, and guards on that: each step is compiled anew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, builder
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lightning_hotcompile.swap.tracing.left_variable import STACK
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_WITH_SYMBOLS = frozenset({"ceil", "floor", "trunc"})
"""Functions of ``math`` that ask the number itself. Some others have a twin in torch, as ``sqrt`` has."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise.

    A function of ``math`` that it cannot compute of a symbol (``exp``) is left to Python, at a graph break.
    Numbers are compared at once, with a guard on the outcome: beyond a graph break that would be an output
    of the graph, which torch makes a constant together with the number. So would be ``float(number)``, which
    is the number itself. And a number that a call returned at which a graph ended (a draw, ``loss.item()``)
    is taken to be another one the next time. What ``requires_grad_`` is given is found out, too: Dynamo asks
    for a constant there, and ends in an internal error.
    """

    def call_math(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if _is_beyond_symbols(variable.value) and any(map(is_symbol, args)):
            end_graph(
                "function of a number that changes",
                f"{variable} {args}",
                f"math.{variable.value.__name__} is left to Python: compiled code would have its result as a "
                "constant.",
            )
        return prior(variable, tx, args, kwargs)

    def call_builtin(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn is float and len(args) == 1 and is_symbol(args[0], float):
            return args[0].realize()
        found = prior(variable, tx, args, kwargs)
        if type(found) is SymNodeVariable and _is_outcome_of_floats(found.sym_num):
            return ConstantVariable.create(found.evaluate_expr(tx.output))
        return found

    def returned(prior: Any, tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
        found = prior(tx, name, entry, **kwargs)
        if name.startswith(STACK) and isinstance(entry.scalar, float):
            return dataclasses.replace(found, scalar=auto_dynamic)
        return found

    def method(prior: Any, variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if name == "requires_grad_":
            args = [known(tx, arg) for arg in args]
            kwargs = {key: known(tx, arg) for key, arg in kwargs.items()}
        return prior(variable, tx, name, args, kwargs)

    return [
        Override(TorchInGraphFunctionVariable, "call_function", call_math),
        Override(BuiltinVariable, "call_function", call_builtin),
        Override(builder, "process_automatic_dynamic", returned),
        Override(TensorVariable, "call_method", method),
    ]


def _is_beyond_symbols(function: Any) -> bool:
    if getattr(function, "__module__", None) != math.__name__:
        return False
    name = function.__name__
    return name not in _WITH_SYMBOLS and not hasattr(torch, f"_sym_{name}")


def is_symbol(variable: Any, kind: type = object) -> bool:
    """Whether what Dynamo traces is a number that it has a symbol for, of this kind."""
    found = variable.realize()
    return isinstance(found, SymNodeVariable) and issubclass(found.python_type(), kind)


def known(tx: Any, variable: Any) -> Any:
    """What a comparison has found, with a guard on it."""
    if not is_symbol(variable, bool):
        return variable
    return ConstantVariable.create(variable.realize().evaluate_expr(tx.output))


def _is_outcome_of_floats(number: Any) -> bool:
    """Whether it is true or false by numbers that came into the graph as floats, and by no others."""
    return isinstance(number, torch.SymBool) and is_of_floats(number)


def is_of_floats(number: Any) -> bool:
    """Whether a symbolic number is made of such that came into the graph as floats, and of no others."""
    found = symbols_of(number)
    return bool(found) and all(symbol_is_type(each, SymT.FLOAT) for each in found)


def has_float(number: Any) -> bool:
    """Whether a symbolic number is made of one that came into the graph as a float, among others."""
    return any(symbol_is_type(each, SymT.FLOAT) for each in symbols_of(number))


def symbols_of(number: Any) -> set[Any]:
    """What a symbolic number is made of; none of another number, or of the length of a jagged dimension."""
    expression = getattr(getattr(number, "node", None), "expr", None)
    return set() if expression is None else set(expression.free_symbols)
