"""Numbers of numpy's that a traced step makes: to Python they are what they are, to a graph plain numbers.

Dynamo has Python's number in their place. That has no ``dtype``, does not overflow, is not rounded to 32 bit
and is no ``np.integer``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.variables import BaseListVariable, BuiltinVariable, ConstantVariable

from lightning_hotcompile.swap.overrides import Override

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


def computed_as_numpy_does(break_the_graph: Callable[..., Any]) -> list[Override]:
    """What Python computes of such numbers; their attributes and methods are left to Python.

    Args:
        break_the_graph: Dynamo's function that ends a graph, with a reason in its four arguments.
    """

    def call(prior: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if not any(isinstance(each, NumpyNumber) for each in args):
            return prior(variable, tx, args, kwargs)
        if variable.fn in _PYTHONS and not kwargs and (found := outcome(variable.fn, args)) is not None:
            return found
        if variable.fn in _LEFT_TO_PYTHON:
            return break_the_graph(
                gb_type="attribute of a number of numpy's",
                context=f"{variable} {args}",
                explanation="A graph has no numbers of numpy's.",
                hints=[],
            )
        return prior(variable, tx, args, kwargs)

    return [Override(BuiltinVariable, "call_function", call)]


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
