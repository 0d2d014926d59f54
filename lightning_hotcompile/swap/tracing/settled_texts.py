"""What a text is made of is what it was where the step has asked for the text.

Dynamo makes the text of what is no constant (``f"{total:.3f}"``) after the graph. By then ``total += loss``
has changed the tensor, a list is longer, and ``__str__`` of an object finds other attributes.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import (
    BaseListVariable,
    ConstDictVariable,
    StringFormatVariable,
    TensorVariable,
    TupleVariable,
)

from lightning_hotcompile.swap.tracing.late_items import is_a_number, item_of
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph, traced_now

_VALUES = frozenset([str, int, float, bool])
"""Types of what is known after the graph, and does not change."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise: a tensor that is a number is copied, and other things end the graph."""

    def created(prior: Any, text: str, args: Any, kwargs: Any) -> Any:
        known = [*args, *kwargs.values()]
        if not all(each.is_python_constant() for each in known):
            args, kwargs = list(map(_settled, args)), {name: _settled(each) for name, each in kwargs.items()}
        return prior(text, args, kwargs)

    return [Override(StringFormatVariable, "create", created)]


def _settled(variable: Any) -> Any:
    tx = traced_now().output.current_tx
    variable = variable.realize()
    if isinstance(variable, TensorVariable) and variable.ndim == 0 and is_a_number(tx, variable):
        return item_of(tx, variable)  # of such a tensor Python writes the number
    if _may_change(variable):
        end_graph(
            "text of what may change", f"{variable}", "It is written once the graph has run, as it is then."
        )
    return variable


def _may_change(variable: Any) -> bool:
    if isinstance(variable, TupleVariable):
        return any(_may_change(item.realize()) for item in variable.items)
    if variable.is_python_constant():
        return isinstance(variable, (BaseListVariable, ConstDictVariable))
    try:
        return variable.python_type() not in _VALUES
    except NotImplementedError:
        return True
