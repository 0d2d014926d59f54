"""A list of whole numbers that is made by ``torch.arange`` is a list of constants.

``torch.arange(2, x.dim()).tolist()`` says which dimensions a loss or a norm reduces, in code that TorchScript
is to take as well. To Dynamo these are numbers that depend on data, and no operation takes such dimensions:
each place ended the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from lightning_hotcompile.swap.tracing.overrides import Override

_LONGEST = 64
"""Numbers in such a list; each is a variable of Dynamo's."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        numbers = _numbers(variable) if name == "tolist" and not args and not kwargs else None
        if numbers is None:
            return prior(variable, tx, name, args, kwargs)
        return VariableTracker.build(tx, numbers)

    return [Override(TensorVariable, "call_method", call)]


def _numbers(variable: Any) -> list[int] | None:
    """What is in a tensor that was made of constants, and that nothing has used since, or changed."""
    node = variable.as_proxy().node
    if node.target is not torch.arange or node.users or node.kwargs:
        return None
    if not all(type(each) is int for each in node.args):  # an input's size is a symbol where it varies
        return None
    numbers = range(*node.args)
    return list(numbers) if len(numbers) <= _LONGEST else None
