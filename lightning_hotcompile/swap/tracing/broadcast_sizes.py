"""The KL divergence of two multivariate normals is traced.

Where torch works it out it asks a function in C++ what two shapes broadcast to. Dynamo gives that a shape
which it does not take, and leaves all of the frame to eager: a step with such a loss was not compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """What Dynamo does otherwise: there is a function in Python for the same."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value is torch._C._infer_size:
            return VariableTracker.build(tx, torch.broadcast_shapes).call_function(tx, args, kwargs)
        return prior(variable, tx, args, kwargs)

    return [Override(TorchInGraphFunctionVariable, "call_function", call)]
