"""Lists and dicts that a step makes longer are left to Python, at the price of a graph break.

Compiled code has a guard on how long what is read was: a step that collects its outputs
(``self.outputs.append(loss)``) would be compiled anew in each step, until Dynamo gives it up. So once a graph
in the making is seen to leave one longer than it was, it is traced again, without it.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import BaseListVariable, ConstDictVariable, ListVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import DequeVariable
from torch._guards import ChainedSource

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_KINDS = (list, deque, dict)
_OF_AN_OBJECT, _HANDED_ON = 2, 6
"""So often one that is made longer may have had another length than before, by where it comes from.

What an object has may be filled now and then, where results are looked up. What goes from block to block has
the same few lengths in each step; Dynamo compiles a function eight times and no more.
"""

_LENGTHS = "_hotcompile_lengths"
"""Where a graph in the making keeps how long each was, by the name of where it comes from."""


@dataclass(kw_only=True)
class _Growth:
    """Of one list or dict that some code makes longer."""

    length: int
    """Before the code, as it was traced last."""

    others: int = 0
    """How often that was another one than the time before."""

    is_left: bool = False


_growths: WeakKeyDictionary[types.CodeType, dict[str, _Growth]] = WeakKeyDictionary()
"""By the code that is compiled, and the name of where they come from."""


class GrowsVariable(VariableTracker):
    """What is left to Python: each use ends the graph, and nothing of it is guarded but its type."""

    def __init__(self, kind: type, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    def python_type(self) -> type:
        """A list, deque or dict."""
        return self.kind

    def call_method(self, tx: Any, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Ends the graph."""
        end_graph(
            f"{self.kind.__name__} that grows from step to step",
            f"{name} {self.source}",
            "Compiled code has a guard on its length, and would be compiled anew in each step.",
        )


def grow_in_python() -> list[Override]:
    """What Dynamo does otherwise."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        kind, source = type(value), builder.source
        if kind not in _KINDS or source is None:
            return prior(builder, value)
        found = _growths.get(builder.tx.output.root_tx.f_code, {}).get(source.name)
        if found is None or not found.is_left:
            return prior(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return GrowsVariable(kind, source=source)

    def tracked(prior: Any, effects: Any, item: Any, variable: Any) -> Any:
        source = getattr(variable, "source", None)
        if type(item) in _KINDS and source is not None:
            vars(effects.output_graph_weakref()).setdefault(_LENGTHS, {})[source.name] = len(item)
        return prior(effects, item, variable)

    def written_back(prior: Any, effects: Any, *args: Any, **kwargs: Any) -> Any:
        root = effects.output_graph_weakref().root_tx
        if not root.one_graph and any(_grows(root.f_code, *each) for each in _longer(effects)):
            raise RestartAnalysis(restart_reason="a list or dict that the code makes longer")
        return prior(effects, *args, **kwargs)

    return [
        Override(VariableBuilder, "_wrap", wrapped),
        Override(SideEffects, "track_mutable", tracked),
        Override(SideEffects, "codegen_update_mutated", written_back),
    ]


def _longer(effects: Any) -> Iterator[tuple[Any, int]]:
    """Those that are longer after the code: how it names them, and how long they were."""
    lengths = vars(effects.output_graph_weakref()).get(_LENGTHS, {})
    for variable in effects._get_modified_vars():
        if (
            isinstance(variable, (ListVariable, DequeVariable, ConstDictVariable))
            and variable.source is not None
        ):
            before = lengths.get(variable.source.name)
            if before is not None and len(variable.items) > before:
                yield variable, before


def _grows(code: types.CodeType, variable: Any, length: int) -> bool:
    """Whether one that is longer after this code is to be left to Python from now on.

    At once if it is a list of an object or a module that is not empty before it: who begins anew with each
    step begins with an empty one. Not after a graph break: until then the step may have filled it.
    """
    name = variable.source.name
    found = _growths.setdefault(code, {}).setdefault(name, _Growth(length=length))
    found.others += found.length != length
    found.length = length
    of_object = _is_of_an_object(variable.source)
    collects = isinstance(variable, BaseListVariable) and of_object
    begins = code not in ContinueExecutionCache.generated_code_metadata
    often = found.others >= (_OF_AN_OBJECT if of_object else _HANDED_ON)
    found.is_left = (collects and begins and length > 0) or often
    return found.is_left


def _is_of_an_object(source: Any) -> bool:
    """Whether it is an attribute, or in one, and not an argument of the function."""
    while isinstance(source, ChainedSource):
        if isinstance(source, AttrSource):
            return True
        source = source.base
    return False
