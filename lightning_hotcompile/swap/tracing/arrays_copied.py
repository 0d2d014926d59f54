"""``torch.tensor`` of a numpy array copies it without a word.

To Dynamo an array is a tensor, and torch warns where ``torch.tensor`` is given one: while the step is traced,
in the comparison, and in each run of the captured graph. Where warnings are errors the step stayed eager.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override

_KNOWN = frozenset({"dtype", "device"})


def overrides() -> list[Override]:
    """What Dynamo does otherwise: it calls for the copy what takes a tensor as well."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value is torch.tensor and len(args) == 1 and kwargs.keys() <= _KNOWN:
            array = args[0].realize()
            if isinstance(array, NumpyNdarrayVariable):
                return VariableTracker.build(tx, _copy_of).call_function(tx, [array], kwargs)
        return prior(variable, tx, args, kwargs)

    return [Override(TorchInGraphFunctionVariable, "call_function", call)]


def _copy_of(array: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return torch.as_tensor(array, dtype=dtype, device=device).clone()
