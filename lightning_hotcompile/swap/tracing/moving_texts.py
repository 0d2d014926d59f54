"""A text that comes over a graph break and is another one each time (a path, a time of day) is no constant.

Dynamo has symbols for numbers that change, and none for text: what uses such a text was compiled anew in
each step, and given up at Dynamo's limit. What only keeps it, or writes it into another text, needs no
symbol.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import ExactWeakKeyDictionary
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

from lightning_hotcompile.swap.tracing.number_texts import LateText
from lightning_hotcompile.swap.tracing.overrides import Override, as_written

_CONSTANTS = 4
"""So many values are constants, each with code of its own, as the names of a few layers are."""

_values: Any = ExactWeakKeyDictionary()
"""By name of the source, by the code that goes on after a break."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        source, code = builder.source, builder.tx.output.root_tx.f_code
        if type(value) is not str or not isinstance(source, LocalSource) or as_written(code) is code:
            return prior(builder, value)
        if code not in _values:
            _values[code] = defaultdict(set)
        values = _values[code][source.name]
        if len(values | {value}) <= _CONSTANTS:
            values.add(value)
            return prior(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return LateText("{}", [_Given(source=source)], {}, source=source)

    return [Override(VariableBuilder, "_wrap", wrapped)]


class _Given(VariableTracker):
    """The text as it is given."""

    def python_type(self) -> type:
        """Called by Dynamo."""
        return str
