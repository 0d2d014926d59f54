"""Lists and dicts that a step makes longer are left to Python, at the price of a graph break.

Compiled code has a guard on how long what is read was: a step that collects its outputs
(``self.outputs.append(loss)``) would be compiled anew in each step, until Dynamo gives it up. So once a graph
in the making is seen to leave one longer than it was, it is traced again, without it.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.utils import ExactWeakKeyDictionary
from torch._dynamo.variables import BaseListVariable, BuiltinVariable, ConstDictVariable, ListVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._guards import ChainedSource

from lightning_hotcompile.swap.tracing.left_variable import STACK, LeftVariable, has_name, left_to_python
from lightning_hotcompile.swap.tracing.overrides import Override, as_written

_METHOD = types.BuiltinMethodType
_MAKE_LONGER = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update"})
_KINDS, _VARIABLES = (list, deque, dict), (ListVariable, DequeVariable, ConstDictVariable)
_OF_AN_OBJECT, _HANDED_ON = 2, 6
"""So often one that is made longer may have had another length than before, by where it comes from.

What an object has may be filled now and then, where results are looked up. What goes from block to block has
the same few lengths in each step; Dynamo compiles a function eight times and no more.
"""

_OPERATIONS = frozenset(filter(callable, vars(operator).values())) - {operator.is_, operator.is_not}
"""What torch 2.11 may answer from one side alone: ``[] == self.losses`` is false."""

_SEVERAL = 2
_OF_BLOCKS = ("call_module", "call_forward")
"""How the code of a module begins by its name, see ``swap/swapped_region.py``."""

_LENGTHS = "_hotcompile_lengths"
"""Where a graph in the making keeps how long each was, and what it is to Dynamo, by where it comes from."""


@dataclass(kw_only=True)
class _Growth:
    """Of one list or dict that some code makes longer."""

    length: int
    """Before the code, as it was traced last."""

    others: int = 0
    """How often that was another one than the time before."""


_ENDS: dict[type, str] = {
    **{kind: f"{kind.__name__} that grows from step to step" for kind in _KINDS},
    _METHOD: "call of a list or dict after a graph break in it",
}

_WHY = "Compiled code has a guard on its length, and would be compiled anew in each step."

_growths: Any = ExactWeakKeyDictionary()
"""By the code that is compiled, and the name of where they come from."""

_left: Any = ExactWeakKeyDictionary()
"""Names of what is left to Python, by the code of the function; what comes after a break is a part of it."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        kind, source = type(value), builder.source
        if kind not in _ENDS or source is None:
            return prior(builder, value)
        left = _left.get(as_written(builder.tx.output.root_tx.f_code), ())
        if not (_is_on_the_stack(value, source) if kind is _METHOD else source.name in left):
            return prior(builder, value)
        return left_to_python(builder, value, _ENDS[kind], _WHY)

    def tracked(prior: Any, effects: Any, item: Any, variable: Any, *kind: Any) -> Any:
        source = getattr(variable, "source", None)
        if type(item) in _KINDS and source is not None:
            vars(effects.output_graph_weakref()).setdefault(_LENGTHS, {})[source.name] = len(item), variable
        return prior(effects, item, variable, *kind)

    def written_back(prior: Any, effects: Any, *args: Any, **kwargs: Any) -> Any:
        root = effects.output_graph_weakref().root_tx
        found = [] if root.one_graph else [*_longer(effects), *_about_to_be_longer(root)]
        if any(_grows(root.f_code, *each) for each in found):
            raise UnspecializeRestartAnalysis(restart_reason="a list or dict that the code makes longer")
        return prior(effects, *args, **kwargs)

    def operated(prior: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        for each in args if function.fn in _OPERATIONS else ():
            if isinstance(left := each.unwrap(), LeftVariable):
                left.ends_graph()
        return prior(function, tx, args, kwargs)

    return [
        Override(BuiltinVariable, "call_function", operated),
        Override(VariableBuilder, "_wrap", wrapped),
        Override(SideEffects, "track_mutable", tracked),
        Override(SideEffects, "codegen_update_mutated", written_back),
    ]


def _longer(effects: Any) -> Iterator[tuple[Any, int]]:
    """Those that are longer after the code: how it names them, and how long they were."""
    lengths = vars(effects.output_graph_weakref()).get(_LENGTHS, {})
    for variable in effects._get_modified_vars():
        if isinstance(variable, _VARIABLES) and variable.source is not None:
            before, _ = lengths.get(variable.source.name, (None, None))
            if before is not None and len(variable.items) > before:
                yield variable, before
    for source, put in _put(effects):  # ``self.seen = [*self.seen, loss]``
        before, variable = lengths.get(source.name, (None, None))
        if before is not None and isinstance(put, ListVariable) and len(put.items) > before:
            yield variable, before


def _put(effects: Any) -> Iterator[tuple[Any, Any]]:
    """What the code puts in the place of something: as an attribute, or as an item of a dict."""
    for owner, attributes in effects.store_attr_mutations.items():
        if has_name(owner.source):
            yield from ((AttrSource(owner.source, name), put) for name, put in attributes.items())
    for variable in effects._get_modified_vars():
        source: Any = variable.source
        if isinstance(variable, ConstDictVariable) and has_name(source):
            for key, put in variable.items.items():
                if key.vt.is_python_constant():
                    yield DictGetItemSource(source, key.vt.as_python_constant()), put


def _is_on_the_stack(method: Any, source: Any) -> bool:
    """Whether it is ``self.losses.append`` of ``self.losses.append(loss.item())``, beyond the break in there.

    It is another one each time, and Dynamo's code for one is invalid when that is gone.
    """
    return type(method.__self__) in _KINDS and source.name.startswith(STACK)


def _about_to_be_longer(root: Any) -> Iterator[tuple[Any, int]]:
    """Those whose method is on the stack where a graph ends, to be called after it: ``append(x.item())``."""
    for name, owner in filter(None, map(_method_of, root.stack)):
        if name in _MAKE_LONGER:
            variable = owner.realize()
            if isinstance(variable, _VARIABLES) and variable.source is not None:
                yield variable, len(variable.items)


def _method_of(variable: Any) -> tuple[str, Any] | None:
    """Name and object of a method that is about to be called, which is of another kind from torch 2.14 on."""
    name = variable.name if isinstance(variable, GetAttrVariable) else getattr(variable, "method_name", None)
    return None if name is None else (name, variable.obj)


def _of(code: types.CodeType, kept: Any, at_first: Any) -> Any:
    if code not in kept:
        kept[code] = at_first
    return kept[code]


def _grows(code: types.CodeType, variable: Any, length: int) -> bool:
    """Whether one that is longer after this code is to be left to Python from now on, and was not before.

    At once if it is a list of an object that holds several items before a step: who begins anew with each
    begins with none, or with one. Not before a block, or after a graph break: the step may have filled it.
    """
    name, left = variable.source.name, _of(as_written(code), _left, set())
    if name in left:  # and Dynamo has come by it in another way
        return False
    found = _of(code, _growths, {}).setdefault(name, _Growth(length=length))
    found.others += found.length != length
    found.length = length
    of_object = _is_of_an_object(variable.source)
    begins = as_written(code) is code and not code.co_name.startswith(_OF_BLOCKS)
    collects = isinstance(variable, BaseListVariable) and of_object and begins and length >= _SEVERAL
    if collects or found.others >= (_OF_AN_OBJECT if of_object else _HANDED_ON):
        left.add(name)
    return name in left


def _is_of_an_object(source: Any) -> bool:
    """Whether it is an attribute, or in one, and not an argument of the function."""
    while isinstance(source, ChainedSource):
        if isinstance(source, AttrSource):
            return True
        source = source.base
    return False
