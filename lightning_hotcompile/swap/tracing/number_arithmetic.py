"""Powers, quotients and roots that compiled code has otherwise than Python.

A captured graph is written as Python, without brackets: ``(-1) ** x`` becomes ``-1 ** x`` there, which is -1
whatever ``x`` is. Of floats that change ``f // 0.1`` is a quotient that is rounded down (10 of 1.0, where
Python's is 9). Where Python raises, at a division by 0.0 or a root of -1, a graph goes on with infinity or
NaN. And its numbers are finite: it takes ``f - f`` for 0, of infinity too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.changing_numbers import known
from lightning_hotcompile.swap.tracing.overrides import Override, add_guard, end_graph

_POWERS = (pow, operator.pow, operator.ipow)
_QUOTIENTS = (operator.truediv, operator.itruediv)
_WHOLE_QUOTIENTS = (operator.floordiv, operator.ifloordiv, operator.mod, operator.imod, divmod)

_Bounds = Sequence[tuple[Callable[[Any, Any], Any], float]]
_POSITIVE: _Bounds = ((operator.gt, 0.0),)
_BOUNDS: dict[Callable[..., Any], _Bounds] = {
    math.sqrt: ((operator.ge, 0.0),),
    math.log2: _POSITIVE,
    **dict.fromkeys((math.acos, math.asin), ((operator.ge, -1.0), (operator.le, 1.0))),
}
"""Where functions of ``math`` that a graph can compute raise no error."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise: whether Python would raise is guarded, and the rest is left to Python."""

    def call(prior: Any, function: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return prior(function, tx, args, kwargs)
        first, second = (arg.unwrap() for arg in args)
        if function.fn in _POWERS and isinstance(second, (TensorVariable, SymNodeVariable)):
            first = first.realize()
            if _is_negative(first) and type(second) is TensorVariable:
                return VariableTracker.build(tx, torch.pow).call_function(tx, [first, second], {})
            if _is_negative(first) and isinstance(second, SymNodeVariable):
                _leave("power of a negative number", first, second)
        if _change(first, second):
            _look_at_numbers(tx, function.fn, first, second)
        return prior(function, tx, args, kwargs)

    def call_math(prior: Any, function: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        bounds = _BOUNDS.get(function.value, ()) if len(args) == 1 and not kwargs else ()
        if bounds and isinstance(number := args[0].realize(), SymNodeVariable):
            _guard(tx, number, bounds)
        return prior(function, tx, args, kwargs)

    def symbol(prior: Any, builder: Any, value: float) -> Any:
        found = prior(builder, value)
        if isinstance(found, SymNodeVariable):
            add_guard(builder.source, _is_finite, f"{builder.source.name} is finite")
        return found

    return [
        Override(BuiltinVariable, "call_function", call),
        Override(TorchInGraphFunctionVariable, "call_function", call_math),
        Override(VariableBuilder, "wrap_symfloat", symbol),
    ]


def _look_at_numbers(tx: Any, function: Any, first: Any, second: Any) -> None:
    """Two numbers of which one changes, at least."""
    if function in _WHOLE_QUOTIENTS and any(each.python_type() is float for each in (first, second)):
        _leave("whole quotient of floats", first, second)
    if function in (*_QUOTIENTS, *_WHOLE_QUOTIENTS) and isinstance(second, SymNodeVariable):
        _guard(tx, second, ((operator.ne, 0.0),))
    if function in _POWERS and isinstance(first, SymNodeVariable) and not _is_natural(second):
        _guard(tx, first, _POSITIVE)


def _guard(tx: Any, number: Any, bounds: _Bounds) -> None:
    if not number.sym_num.node.has_hint():
        return  # of a tensor's element, which nobody knows yet
    for comparison, bound in bounds:
        limit = ConstantVariable.create(bound if number.python_type() is float else int(bound))
        holds = known(tx, BuiltinVariable(comparison).call_function(tx, [number, limit], {}))
        if not holds.as_python_constant():
            _leave("number that Python may refuse", number, limit)


def _leave(what: str, *numbers: Any) -> None:
    end_graph(what, " ".join(map(str, numbers)), "Compiled code would compute another number than Python.")


def _change(first: Any, second: Any) -> bool:
    kinds = (SymNodeVariable, ConstantVariable)
    both = isinstance(first, kinds) and isinstance(second, kinds)
    return both and (isinstance(first, SymNodeVariable) or isinstance(second, SymNodeVariable))


def _is_negative(variable: Any) -> bool:
    value = variable.value if isinstance(variable, ConstantVariable) else None
    return isinstance(value, (int, float)) and math.copysign(1, value) < 0


def _is_natural(variable: Any) -> bool:
    value = variable.value if isinstance(variable, ConstantVariable) else None
    return isinstance(value, int) and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
