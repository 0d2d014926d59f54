"""A text that is another one each time is no constant: one that comes over a graph break, or is in a list.

Dynamo has symbols for numbers that change, and none for text: what uses such a text (a path, a time of day,
the words that a batch has for labels) was compiled anew in each step, and given up at Dynamo's limit. What
only keeps it, or writes it into another text, needs no symbol. What looks into it ends the graph.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GetItemSource, LocalSource
from torch._dynamo.utils import ExactWeakKeyDictionary
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

from lightning_hotcompile.swap.tracing.number_texts import LateText
from lightning_hotcompile.swap.tracing.overrides import Override, as_written

_CONSTANTS = 4
"""So many values are constants, each with code of its own, as the names of a few layers are."""

_CONSTANTS_OF_A_LIST = 2
"""Of an item of a list, since code is compiled anew only a few times, and the next batch has other texts."""

_values: Any = ExactWeakKeyDictionary()
"""By name of the source, by the code that goes on after a break."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        if type(value) is not str:
            return prior(builder, value)
        source, code = builder.source, builder.tx.output.root_tx.f_code
        if isinstance(source, LocalSource) and as_written(code) is not code:
            moves = _moves(code, source.name, value, _CONSTANTS)
        elif isinstance(source, GetItemSource) and _is_given(source):
            moves = _moves(code, source.name, value, _CONSTANTS_OF_A_LIST)
        else:
            moves = False
        if not moves:
            return prior(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return LateText("{}", [_Given(source=source)], {}, source=source)

    return [Override(VariableBuilder, "_wrap", wrapped)]


def _is_given(source: Any) -> bool:
    """Whether it is in an argument; modules that share their code may each have texts of their own."""
    while hasattr(source, "base"):
        source = source.base
    return isinstance(source, LocalSource) and source.local_name != "self"


def _moves(code: Any, name: str, value: str, most: int) -> bool:
    """Whether this one is the next after so many values; it counts as one of them if it is not."""
    if code not in _values:
        _values[code] = defaultdict(set)
    values = _values[code][name]
    if len(values | {value}) > most:
        return True
    values.add(value)
    return False


class _Given(VariableTracker):
    """The text as it is given."""

    def python_type(self) -> type:
        """Called by Dynamo."""
        return str
