"""Lists in a tuple that a module has (``self.seen = ([], [])``) are lists.

Dynamo takes such a tuple for a constant, with what is in its lists. It guards that it is equal to itself,
which it is whatever the lists hold: compiled code would go on with what they held once. And what the step
appends goes to a copy.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """What Dynamo does otherwise: it looks at the items one by one, as outside of modules."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        if type(value) is not tuple or _is_hashable(value):
            return prior(builder, value)
        with patch.object(ConstantVariable, "is_literal", lambda *_: False):
            return prior(builder, value)

    return [Override(VariableBuilder, "_wrap", wrapped)]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
