"""A graph that ends at a recurrent layer in a short loop (``for layer in self.layers``) goes on after it.

Dynamo leaves all of a function to eager where a graph ends in a loop, for what comes after it is compiled
anew in each pass: a loop over time would have as many graphs as it has passes. A stack of recurrent layers
has few, and so has a network that goes around a sparse tensor. What such a loop goes through, be it a ``zip``
or a module list, is then a tuple of what is left of it, which is what Dynamo can go on with.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from typing import Any

from torch._dynamo import variables
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import iter as iterators
from torch._dynamo.variables import lists
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable as _Generator

from lightning_hotcompile.swap.tracing.overrides import Override
from lightning_hotcompile.swap.tracing.recurrent_layers import RECURRENT
from lightning_hotcompile.swap.tracing.sparse_tensors import SPARSE

MOST_PASSES = 6
"""Compiled twice, for one size and then for any, they are not many more than Dynamo compiles of one code."""

_ENDS = frozenset(["RETURN_VALUE", "RETURN_CONST"])
_VIEWS = getattr(iterators, "DictViewIterator", None)
_RANGES = getattr(lists, "RangeIteratorVariable", None)


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def goes_back(prior: Any, tx: Any) -> Any:
        return prior(tx) and not (_ends_at_a_layer() and _passes(tx) <= MOST_PASSES)

    def reconstruct(prior: Any, variable: Any, codegen: Any) -> Any:
        is_a_view = _VIEWS is not None and isinstance(variable, _VIEWS)  # Dynamo has no way for one
        used = [each.unwrap() for each in codegen.tx.stack] if is_a_view else _open_loops(codegen.tx)
        left = _left(variable) if variable in used else None
        if left is None:
            return prior(variable, codegen)
        rest = lists.ListIteratorVariable(list(left), mutation_type=variable.mutation_type)
        return rest.reconstruct(codegen)

    kinds = [kind for kind in (iterators.ZipVariable, _VIEWS) if kind is not None]
    return [
        Override(InstructionTranslatorBase, "maybe_has_backedge", goes_back),
        *(Override(kind, "reconstruct", reconstruct) for kind in kinds),
    ]


def _ends_at_a_layer() -> bool:
    """Whether what ends the graph, and is handled now, is a recurrent layer or the use of a sparse tensor."""
    return getattr(sys.exc_info()[1], "gb_type", None) in (RECURRENT, SPARSE)


def _passes(tx: Any) -> float:
    """How many passes are left of all open loops, this one counted; infinity where nobody knows."""
    loops = _open_loops(tx)
    return math.prod(1 + _number_left(each) for each in loops) if loops else math.inf


def _number_left(variable: Any) -> float:
    if isinstance(variable, _Generator):  # ``enumerate`` is one to Dynamo
        inner = [each.unwrap() for each in variable.inline_tracer.stack]
        numbers = [_number_left(each) for each in inner if _is_iterator(each)]
        return math.prod(numbers) if numbers else math.inf
    left = _left(variable)
    return math.inf if left is None else len(left)


def _open_loops(tx: Any) -> list[Any]:
    """The iterators of all loops that a frame is in, outermost first; none where there are others."""
    if getattr(tx, "parent", None) is not None or getattr(tx, "instruction_pointer", None) is None:
        return []
    now, starts = tx.current_instruction.offset, set()
    for instruction in tx.instructions[tx.instruction_pointer :]:
        if instruction.opname in _ENDS:
            break
        if "JUMP" in instruction.opname and instruction.target and instruction.target.offset < now:
            starts.add((instruction.target.opname, instruction.target.offset))
    found = [each for variable in tx.stack if _is_iterator(each := variable.unwrap())]
    return found if len(found) == len(starts) and all(name == "FOR_ITER" for name, _ in starts) else []


def _is_iterator(variable: Any) -> bool:
    return isinstance(variable, (iterators.IteratorVariable, _Generator))


def _left(variable: Any) -> Sequence[Any] | None:
    """What an iterator still gives; ``None`` where that is not known."""
    if isinstance(variable, lists.ListIteratorVariable):
        return [] if getattr(variable, "is_exhausted", False) else variable.items[variable.index :]
    if _RANGES is not None and isinstance(variable, _RANGES):
        return _numbers_left(variable)
    if _VIEWS is not None and isinstance(variable, _VIEWS):
        return _view_left(variable)
    if isinstance(variable, iterators.ZipVariable) and not variable.strict:
        return _zip_left(variable)
    return None


def _numbers_left(variable: Any) -> Sequence[Any] | None:
    given = (variable.start, variable.step, variable.len)
    if not all(type(each) is int for each in given):
        return None
    start, step, n = given
    return [variables.ConstantVariable.create(start + i * step) for i in range(n)]


def _view_left(variable: Any) -> Sequence[Any]:
    items = list(copy.copy(variable._iter))  # one of Python's own, which is left where it is
    if variable.view_type == "keys":
        return [key.vt for key in items]
    if variable.view_type == "values":
        return items
    return [variables.TupleVariable([key.vt, value]) for key, value in items]


def _zip_left(variable: Any) -> Sequence[Any] | None:
    if hasattr(variable, "iterables"):  # before torch 2.13
        parts = [p[variable.index :] if isinstance(p, list) else _left(p) for p in variable.iterables]
    else:
        parts = [_left(each.unwrap()) for each in variable.iterable.items]
    if not parts or any(part is None for part in parts):
        return None
    return [variables.TupleVariable(list(items)) for items in zip(*parts, strict=False)]
