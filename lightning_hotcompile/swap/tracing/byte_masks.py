"""``torch.where(mask, x, y)`` with a mask of bytes, as arrays of numpy's often are, chooses as in eager.

Torch takes any number but 0 for true and warns. The tensors without values that Dynamo computes with refuse
such a mask, and the frame is left to eager, mostly the whole step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override

_NAME = "condition"


def overrides() -> list[Override]:
    """What Dynamo does otherwise: the mask is turned into one of bools first."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value is torch.where:
            args, kwargs = _with_bools(tx, args, kwargs)
        return prior(variable, tx, args, kwargs)

    def method(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "where":
            args, kwargs = _with_bools(tx, args, kwargs)
        return prior(variable, tx, name, args, kwargs)

    return [
        Override(TorchInGraphFunctionVariable, "call_function", call),
        Override(TensorVariable, "call_method", method),
    ]


def _with_bools(tx: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    named = {name: _as_bools(tx, each) if name == _NAME else each for name, each in kwargs.items()}
    return [*(_as_bools(tx, each) for each in args[:1]), *args[1:]], named


def _as_bools(tx: Any, variable: Any) -> Any:
    found = variable.realize()
    if not isinstance(found, TensorVariable):
        return variable
    is_bytes = found.as_proxy().node.meta["example_value"].dtype is torch.uint8
    return found.call_method(tx, "bool", [], {}) if is_bytes else variable
