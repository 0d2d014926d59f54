"""State of Python's own objects that Dynamo takes for a constant: it is left to Python, at a graph break.

Compiled code would draw the number that was drawn while it was traced, step after step, and say nothing:

- ``random.Random`` objects that are there before the step, or are made in it with another seed each time or
  with none, from torch 2.14 on also the one behind ``random.shuffle``, ``random.sample`` and ``random.seed``;
- what ``popitem`` takes from a ``dict`` or an ``OrderedDict``, and the order after ``move_to_end``;
- the order of a set that is made or changed in the step, and what ``pop`` takes from one;
- a ``deque`` with ``maxlen``, which is traced as one without;
- an attribute of a class that the step sets: read from an instance it would be the one from before;
- from torch 2.14 on, a generator that has not begun.

And an iterator is moved on when all is written back that it gave: that is read where the iterator stands.
"""

from __future__ import annotations

import inspect
import os
import types
from collections import deque
from typing import Any, NoReturn

import torch._dynamo.variables as variables
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.misc import RandomClassVariable, RandomVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def broken(what: str, name: str, variable: Any) -> NoReturn:
        end_graph(
            what,
            f"{name} {variable}",
            "It changes from step to step, and no guard of Dynamo's looks at it.",
        )

    def random_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if variable.source is None:  # made in the step: the same one each time
            return prior(variable, tx, name, *args, **kwargs)
        broken("state of a random number generator of Python's", name, variable)

    def random_made(prior: Any, kind: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        seeds = [each.as_python_constant() if each.is_python_constant() else None for each in args]
        if not kwargs and (not seeds or None in seeds):
            broken("state of a random number generator of Python's", "Random", args)
        return prior(kind, tx, args, kwargs)

    def dict_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if variable.source is not None and name in ("popitem", "move_to_end"):
            broken("order of a dict", name, variable)
        return prior(variable, tx, name, *args, **kwargs)

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        if isinstance(value, deque) and value.maxlen is not None:
            broken("deque with maxlen", "use of", builder)
        if isinstance(value, types.GeneratorType) and inspect.getgeneratorstate(value) == inspect.GEN_CREATED:
            return builder.wrap_user_defined(value)  # as torch before 2.14 does: its use ends the graph
        return prior(builder, value)

    def in_order(prior: Any, variable: Any, tx: Any) -> Any:
        if _has_own_order(variable, tx):
            broken("order of a set", "use of", variable)
        return prior(variable, tx)

    def in_sorted_order(prior: Any, builtin: Any, tx: Any, items: Any, **kwargs: Any) -> Any:
        if _is_set(items) and items.source is None and not kwargs and _are_of_one_order(items):
            items = variables.ListVariable([key.vt for key in items.items])
        return prior(builtin, tx, items, **kwargs)

    def set_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        changes = name in _CHANGE_SETS and (variable.source is not None or name == "pop")
        if changes and _is_set(variable) and not _is_as_before(variable, name, *args):
            broken("order of a set", name, variable)
        return prior(variable, tx, name, *args, **kwargs)

    def subtracted(prior: Any, variable: Any, tx: Any, other: Any) -> Any:
        variable.should_reconstruct_all = True  # torch 2.13 and 2.14 write back what is new alone
        return prior(variable, tx, other)

    def stored(prior: Any, effects: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(item, variables.UserDefinedClassVariable) and item.source is not None:
            broken("attribute of a class", name, item)
        return prior(effects, item, name, *args, **kwargs)

    def in_turn(prior: Any, effects: Any) -> Any:
        return sorted(
            prior(effects), key=lambda variable: isinstance(variable, variables.ListIteratorVariable)
        )

    found = [
        Override(RandomVariable, "call_method", random_method),
        Override(RandomClassVariable, "call_function", random_made),
        *(Override(kind, "call_method", dict_method) for kind in _dicts()),
        Override(VariableBuilder, "_wrap", wrapped),
        Override(SideEffects, "store_attr", stored),
        Override(SideEffects, "_get_modified_vars", in_turn),
        Override(BuiltinVariable, "call_sorted", in_sorted_order),
        *(Override(kind, "call_method", set_method) for kind in _sets()),
        *(Override(kind, "nb_inplace_subtract_impl", subtracted) for kind in _sets()),
        *(Override(kind, name, in_order) for kind in _sets() for name in _ITERATE),
    ]
    return [each for each in found if hasattr(each.owner, each.name)]  # torch 2.11 has no tp_iter_impl


_CHANGE_SETS = frozenset({"add", "clear", "discard", "pop", "remove", "update"}) | frozenset(
    {"difference_update", "intersection_update", "symmetric_difference_update"}
)
"""Methods after which Dynamo would fill the set anew, and so change its order."""

_NOT_IF = {"add": True, "discard": False}
"""Methods that change nothing if the item is there, or if it is not."""

_ITERATE = ("tp_iter_impl", "unpack_var_sequence")
_POLYFILLS = os.path.join("torch", "_dynamo", "polyfills")
_OF_NO_ORDER = frozenset({"einops"})
"""Packages that torch traces through their caches, and whose results depend on the order of no set."""


def _is_set(variable: Any) -> bool:
    return variable.python_type() in (set, frozenset)


def _is_as_before(variable: Any, name: str, items: Any = (), *_: Any) -> bool:
    """Whether this leaves a set as it is, as ``nn.Module`` does with names that are not in one of its own."""
    return name in _NOT_IF and len(items) == 1 and (items[0] in variable) is _NOT_IF[name]


def _has_own_order(variable: Any, tx: Any) -> bool:
    """Whether Python goes through a set in another order than Dynamo, which goes by when items were added.

    One from before the step is traced in its own order, as long as the step does not change it. What torch
    has of its own for sets (a union, a difference) makes sets again.
    """
    if not _is_set(variable) or len(variable.items) < 2 or _is_of_no_order(tx):
        return False
    if variable.source is not None and not tx.output.side_effects.is_modified(variable):
        return False
    items = [key.vt for key in variable.items]
    if not all(item.is_python_constant() for item in items):
        return True  # it goes by their addresses
    values = [item.as_python_constant() for item in items]
    return list(dict.fromkeys(values)) != list(set(values))


def _are_of_one_order(variable: Any) -> bool:
    """Whether all its items are numbers or all are text, so that they are sorted in one way only."""
    items = [key.vt for key in variable.items]
    return {item.python_type() if item.is_python_constant() else None for item in items} in ({int}, {str})


def _is_of_no_order(tx: Any) -> bool:
    """Whether the function that is traced goes through sets whose order is of no importance."""
    package = str(tx.f_globals.get("__name__")).partition(".")[0]
    return package in _OF_NO_ORDER or _POLYFILLS in tx.f_code.co_filename


def _dicts() -> list[type]:
    return _kinds("ConstDictVariable", "OrderedDictVariable")  # the latter from torch 2.13 on


def _sets() -> list[type]:
    return _kinds("SetVariable")


def _kinds(*names: str) -> list[type]:
    return [getattr(variables, name) for name in names if hasattr(variables, name)]
