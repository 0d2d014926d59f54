"""A graph that ends at a recurrent layer in a short loop (``for layer in self.layers``) goes on after it.

Dynamo leaves all of a function to eager where a graph ends in a loop, for what comes after it is compiled
anew in each pass: a loop over time would have as many graphs as it has passes. A stack of recurrent layers
has few, and so has a network that goes around a sparse tensor. What such a loop goes through, be it a ``zip``
or a module list, is then a tuple of what is left of it, which is what Dynamo can go on with. Not so where
that is a list or dict that the code can still reach, and so change, or an iterator that it can move on.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch._dynamo import variables
from torch._dynamo.polyfills import builtins as polyfills
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import iter as iterators
from torch._dynamo.variables import lists
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable as _Generator

from lightning_hotcompile.swap.tracing.overrides import Override
from lightning_hotcompile.swap.tracing.recurrent_layers import RECURRENT
from lightning_hotcompile.swap.tracing.sparse_tensors import SPARSE

MOST_PASSES = 6
"""Compiled twice, for one size and then for any, they are not many more than Dynamo compiles of one code."""

_ENDS = frozenset(["RETURN_VALUE", "RETURN_CONST"])
_CONTAINERS = (variables.ListVariable, lists.DequeVariable, variables.ConstDictVariable)
_VIEWS = getattr(iterators, "DictViewIterator", None)
_RANGES = getattr(lists, "RangeIteratorVariable", None)


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def goes_back(prior: Any, tx: Any) -> Any:
        return prior(tx) and not (_ends_at_a_layer() and _passes(tx) <= MOST_PASSES)

    def reconstruct(prior: Any, variable: Any, codegen: Any) -> Any:
        is_a_view = _VIEWS is not None and isinstance(variable, _VIEWS)  # Dynamo has no way for one
        used = is_a_view and not _can_be_changed(codegen.tx, [variable])
        left = _left(variable) if used or variable in _open_loops(codegen.tx) else None
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
    if not loops or _can_be_changed(tx, loops):
        return math.inf
    return math.prod(1 + _number_left(each) for each in loops)


def _number_left(variable: Any) -> float:
    if isinstance(variable, _Generator):
        numbers = [_number_left(each) for each in _inside(variable)] if _is_enumerate(variable) else []
        return math.prod(numbers) if numbers else math.inf
    left = _left(variable)
    return math.inf if left is None else len(left)


def _is_enumerate(generator: Any) -> bool:
    """``enumerate`` is a generator to Dynamo; one of the user's may look at what the loop changes."""
    code = generator.get_code()
    return bool(code.co_name == "enumerate" and code.co_filename == polyfills.__file__)


def _inside(variable: Any) -> list[Any]:
    """What an iterator takes its items of: other iterators, or lists of Dynamo's variables."""
    if isinstance(variable, _Generator):
        return [each for item in variable.inline_tracer.stack if _is_iterator(each := item.unwrap())]
    if not isinstance(variable, iterators.ZipVariable):
        return []
    parts = variable.iterables if hasattr(variable, "iterables") else variable.iterable.items
    return [part if isinstance(part, list) else part.unwrap() for part in parts]


def _can_be_changed(tx: Any, loops: Sequence[Any]) -> bool:
    """Whether the code can still reach what its open loops go through.

    Items are appended to a list that a loop goes through, the next loop takes the rest of an iterator, and
    ``zip(it, it)`` takes two of it each time.
    """
    inside = [part for each in loops for part in _all_inside(each)]
    reached = set(map(id, loops))

    def reach(variable: Any) -> None:
        kind = type(variable)  # to ask for the instance would have Dynamo look at what nobody has used yet
        if issubclass(kind, (iterators.IteratorVariable, _Generator)):
            reached.add(id(variable))
        elif issubclass(kind, _CONTAINERS) and not _is_of_modules(variable.source):
            reached.add(id(variable.items))

    effects = tx.output.side_effects
    others = [each for each in tx.stack if each.unwrap() not in loops]
    for known in (others, tx.symbolic_locals, effects.id_to_variable, effects.store_attr_mutations):
        VariableTracker.visit(reach, known)
    gone_through = [id(each) for loop in (*loops, *inside) for each in _containers(loop)]
    return len(set(map(id, inside))) < len(inside) or not reached.isdisjoint(
        [*map(id, inside), *gone_through]
    )


def _all_inside(variable: Any) -> Iterator[Any]:
    for part in _inside(variable):
        yield part
        yield from _all_inside(part)


def _containers(variable: Any) -> list[Any]:
    """The lists and dicts of Dynamo's variables that an iterator goes through."""
    if isinstance(variable, list):
        return [variable]
    if isinstance(variable, lists.ListIteratorVariable):
        return [variable.items]
    if _VIEWS is not None and isinstance(variable, _VIEWS):
        return [each for each in gc.get_referents(variable._iter) if isinstance(each, dict)]
    return []


def _is_of_modules(source: Any) -> bool:
    """Whether a dict is the one in which a module has others: a list or dict of modules goes through that."""
    return bool(getattr(source, "member", None) == "_modules")


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
    if type(variable) is iterators.ZipVariable and not variable.strict:  # ``map`` is one, too, in torch 2.11
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
    # before torch 2.13 it goes through lists by itself
    parts = [p[variable.index :] if isinstance(p, list) else _left(p) for p in _inside(variable)]
    if not parts or any(part is None for part in parts):
        return None
    return [variables.TupleVariable(list(items)) for items in zip(*parts, strict=False)]
