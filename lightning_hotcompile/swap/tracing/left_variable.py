"""What stands, while a frame is traced, for an object that only Python itself is to use."""

from __future__ import annotations

from typing import Any, NoReturn

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import LocalCellSource, TempLocalSource
from torch._dynamo.variables.base import VariableTracker
from torch._guards import ChainedSource

from lightning_hotcompile.swap.tracing.overrides import end_graph

STACK = "L['___stack"
"""Begins the name of what was on the stack where a graph ended: what the call there has returned, say."""


def has_name(source: Any) -> bool:
    """Whether what is at this source can be found by the same name in the next step.

    Not so what the code makes itself, and a variable of a function around it.
    """
    while isinstance(source, ChainedSource):
        source = source.base
    return source is not None and not isinstance(source, (LocalCellSource, TempLocalSource))


class LeftVariable(VariableTracker):
    """What is left to Python: each use ends the graph, and nothing of it is guarded but its type."""

    def __init__(self, kind: type, what: str, why: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind, self.what, self.why = kind, what, why

    def python_type(self) -> type:
        """Of the object."""
        return self.kind

    def ends_graph(self, *args: Any, **kwargs: Any) -> NoReturn:
        """In place of what Dynamo does with one: else an empty list would count as true, say."""
        end_graph(self.what, f"{self.source}", self.why)


_SLOTS = ("sq_", "mp_", "nb_")
_OTHER_USES = frozenset(
    {"call_method", "call_function", "unpack_var_sequence", "force_unpack_var_sequence", "call_obj_hasattr"}
    | {"has_unpack_var_sequence", "has_force_unpack_var_sequence", "is_python_equal", "get_python_hash"}
)
_NO_USES = frozenset({"tp_getattro_impl", "hash_impl"})
"""By the first of them a method is looked up, which ends the graph when it is called."""

for _name in dir(VariableTracker):
    _is_use = _name.endswith("_impl") or _name.startswith(_SLOTS) or _name in _OTHER_USES
    if _is_use and _name not in _NO_USES:
        setattr(LeftVariable, _name, LeftVariable.ends_graph)


def left_to_python(builder: Any, value: Any, what: str, why: str) -> LeftVariable:
    """The variable of a value that comes into a frame, with its guard.

    Args:
        builder: Dynamo's, of this value.
        value: as it is now.
        what: ends a graph where it is used.
        why: it does, for the user.
    """
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    return LeftVariable(type(value), what, why, source=builder.source)
