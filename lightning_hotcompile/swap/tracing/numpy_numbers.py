"""Numbers of numpy's that a traced step makes: to Python they are what they are, to a graph plain numbers.

Dynamo has Python's number in their place. That has no ``dtype``, does not overflow, is not rounded to 32 bit
and is no ``np.integer``.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.source import GetItemSource
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables import (
    BaseListVariable,
    BuiltinVariable,
    ConstantVariable,
    LazyVariableTracker,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyConstantVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override, add_guard, end_graph

NUMBER = (bool, int, float, complex)

_OPERATORS = (
    "add and_ eq floordiv ge gt inv invert is_ is_not le lshift lt mod mul ne neg not_ or_ pos pow rshift "
    "sub truediv truth xor abs index "
    "iadd iand ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor"
)
_PYTHONS = frozenset(
    [bool, int, float, complex, abs, round, max, min, pow, str, repr]
    + [getattr(operator, name) for name in _OPERATORS.split()]
)
"""What is computed of numbers and has no other effect."""

_LEFT_TO_PYTHON = frozenset([getattr, divmod])
_OF_ARRAYS = (_PYTHONS | {isinstance, type}) - {operator.is_, operator.is_not}
_MAKE_TENSORS = (torch.tensor, torch.as_tensor, torch.asarray)


class NumpyNumber(ConstantVariable):
    """A number that numpy has made while a step was traced.

    Args:
        number: of numpy's, with a number of Python's as its ``item()``.
    """

    def __init__(self, number: Any, **kwargs: Any) -> None:
        kwargs.pop("value", None)  # of the one that this is a copy of
        super().__init__(number.item(), **kwargs)
        self.number = number

    def as_python_constant(self) -> Any:
        """For what Python does with it; ``as_proxy`` is for the graph, which knows Python's numbers only."""
        return self.number

    def python_type(self) -> type:
        """For ``type`` and ``isinstance``."""
        return type(self.number)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        """For ``hasattr``."""
        return ConstantVariable.create(hasattr(self.number, name))

    def reconstruct(self, codegen: Any) -> None:
        """Load it where Python goes on after a graph."""
        codegen.append_output(create_instruction("LOAD_CONST", argval=self.number))


def overrides() -> list[Override]:
    """What Python computes of such numbers; their attributes and methods are left to Python."""

    def left(what: str, variable: Any, args: Sequence[Any]) -> NoReturn:
        end_graph(
            what,
            f"{variable} {args}",
            "A graph has Python's numbers and tensors, with other types and other dtypes.",
        )

    def call(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn in _OF_ARRAYS and _is_otherwise_of_arrays(args):
            left("computation with a number of numpy's", variable, args)
        if not any(isinstance(each, NumpyNumber) for each in args):
            return prior(variable, tx, args, kwargs)
        if variable.fn in _PYTHONS and (found := outcome(variable.fn, args, kwargs)) is not None:
            return found
        if variable.fn in _LEFT_TO_PYTHON:
            left("attribute of a number of numpy's", variable, args)
        if any(isinstance(each, SymNodeVariable) for each in args):
            left("number of numpy's and one that changes", variable, args)
        return prior(variable, tx, args, kwargs)

    def array(prior: Any, variable: Any, proxy: Any, **kwargs: Any) -> Any:
        """Of an array with dimensions numpy gives a number where Dynamo has an array of none."""
        example = proxy.node.meta.get("example_value")
        if proxy.node.op != "placeholder" and getattr(example, "ndim", None) == 0:
            left("number out of an array of numpy's", proxy, [])
        return prior(variable, proxy, **kwargs)

    def make(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if any(variable.value is each for each in _MAKE_TENSORS) and any(map(_holds_one, args)):
            left("tensor of numbers of numpy's", variable, args)
        return prior(variable, tx, args, kwargs)

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        if not isinstance(value, np.integer) or not _is_setting(builder.source):
            return prior(builder, value)
        add_guard(builder.source, lambda now: bool(now == value), f"{builder.source.name} is {value}")
        return NumpyNumber(value, source=builder.source)

    return [
        Override(VariableBuilder, "_wrap", wrapped),
        Override(BuiltinVariable, "call_function", call),
        Override(NumpyNdarrayVariable, "__init__", array),
        Override(TorchInGraphFunctionVariable, "call_function", make),
    ]


def comparisons_are_calls() -> AbstractContextManager[object]:
    """Comparisons go the way of other calls: Dynamo's table of them is older than what is overridden."""
    late = {
        symbol: functools.partial(_call, method.__self__)
        for symbol, method in compare_op_handlers.items()
        if isinstance(method, types.MethodType)
    }
    return patch.dict(compare_op_handlers, late)


def _is_setting(source: Any) -> bool:
    """Whether a number is an item of what a layer has: a tensor could be no stride and no padding."""
    is_item = isinstance(source, GetItemSource)
    return is_item and source.guard_source.is_unspecialized_builtin_nn_module()


def _call(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    return variable.call_function(tx, args, kwargs)


def _holds_one(variable: Any) -> bool:
    if isinstance(variable, BaseListVariable):
        return any(map(_holds_one, variable.items))
    return isinstance(variable, NumpyNumber)


def _is_otherwise_of_arrays(args: Sequence[Any]) -> bool:
    """Whether a number of numpy's that was there before is there, and the result is not that of a number.

    It is with tensors of floats that have a dimension: their dtype is the result's, whatever the array's is.
    """
    known = list(map(_looked_at, args))
    arrays = [each for each in known if isinstance(each, NumpyNdarrayVariable) and each.ndim == 0]
    return bool(arrays) and not any(map(_is_of_floats, known))


def _looked_at(variable: Any) -> Any:
    """Of a number or text that is there as an input Dynamo guards the type alone, as long as that will do."""
    is_waiting = isinstance(variable, LazyVariableTracker) and not isinstance(variable, LazyConstantVariable)
    return variable.realize() if is_waiting else variable


def _is_of_floats(variable: Any) -> bool:
    is_tensor = isinstance(variable, TensorVariable) and not isinstance(variable, NumpyNdarrayVariable)
    return (
        is_tensor and bool(variable.ndim) and variable.dtype is not None and variable.dtype.is_floating_point
    )


def outcome(function: Any, args: Sequence[Any], kwargs: Any = None) -> ConstantVariable | None:
    """What a call comes to of which all is known, and which has to do with numbers only; None of others."""
    named = dict(kwargs or {})
    if not all(each.is_python_constant() for each in (*args, *named.values())):
        return None
    try:
        known, known_by_name = list(map(_known, args)), {name: _known(each) for name, each in named.items()}
        if not _are_numbers([*known, *known_by_name.values()]):
            return None
        found = function(*known, **known_by_name)
    except Exception:  # noqa: BLE001  # it is raised again, in the user's frame
        return None
    if isinstance(found, np.generic):
        return NumpyNumber(found) if isinstance(found.item(), NUMBER) else None
    return ConstantVariable(found) if isinstance(found, (*NUMBER, str)) else None


def _known(variable: Any) -> Any:
    if isinstance(variable, BaseListVariable):
        return variable.python_type()(map(_known, variable.items))
    return variable.as_python_constant()


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(
        _are_numbers(value) if isinstance(value, (list, tuple)) else isinstance(value, (*NUMBER, np.generic))
        for value in values
    )
