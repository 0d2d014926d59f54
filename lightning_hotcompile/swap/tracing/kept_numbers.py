"""Numbers that a step computes and keeps (``self.mean = 0.9 * self.mean + 0.1 * loss.item()``) are Python's.

What a graph makes of a float and gives back as a number torch takes for a constant, together with the float:
each step would be compiled anew. So once a graph in the making is seen to do so it is traced again, without
the attribute and without the numbers that come over a graph break.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.utils import ExactWeakKeyDictionary
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable

from lightning_hotcompile.swap.tracing.changing_numbers import is_of_floats
from lightning_hotcompile.swap.tracing.left_variable import STACK, has_name, left_to_python
from lightning_hotcompile.swap.tracing.overrides import Override, as_written

_WHAT = "number that the step keeps for the next one"
_WHY = "Compiled code would have it as a constant, and would be compiled anew in each step."

_kept: Any = ExactWeakKeyDictionary()
"""Names of attributes, by the code of the function that sets them."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        source = builder.source
        if type(value) is not float or source is None:
            return prior(builder, value)
        names = _kept.get(as_written(builder.tx.output.root_tx.f_code), ())
        if names and (source.name in names or source.name.startswith(STACK)):
            return left_to_python(builder, value, _WHAT, _WHY)
        return prior(builder, value)

    def written_back(prior: Any, effects: Any, *args: Any, **kwargs: Any) -> Any:
        root = effects.output_graph_weakref().root_tx
        if not root.one_graph and (found := _numbers_kept(effects)):
            code = as_written(root.f_code)
            names = _kept.get(code, frozenset())
            if not found <= names:
                _kept[code] = names | found
                raise UnspecializeRestartAnalysis(restart_reason="a number that the code keeps")
        return prior(effects, *args, **kwargs)

    return [
        Override(VariableBuilder, "_wrap", wrapped),
        Override(SideEffects, "codegen_update_mutated", written_back),
    ]


def _numbers_kept(effects: Any) -> frozenset[str]:
    """Names of attributes that are set to what is computed of floats that come in from outside."""
    return frozenset(
        AttrSource(variable.source, name).name
        for variable, values in effects.store_attr_mutations.items()
        for name, value in values.items()
        if has_name(variable.source) and _is_computed(value)
    )


def _is_computed(variable: Any) -> bool:
    if not isinstance(variable, SymNodeVariable):
        return False
    number = variable.sym_num
    return isinstance(number, torch.SymFloat) and is_of_floats(number)
