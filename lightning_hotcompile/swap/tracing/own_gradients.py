"""A step that asks for gradients of what it has computed itself runs as the user wrote it.

Dynamo ends the graph there, and what was computed until then comes out of one compiled graph. To autograd
that is one function: none of its outputs depends on another one, so the gradient of a loss by an activation
(``torch.autograd.grad(loss, z)``, as MGDA, FGM on embeddings and Grad-CAM ask for) does not exist. Modules
that the step calls are compiled by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.errors import HotCompileError
from lightning_hotcompile.swap.tracing.overrides import Override

_INPUTS = 1
"""Place of the inputs among the arguments of ``torch.autograd.grad``."""


class GradientsOfResultsError(HotCompileError):
    """Raised while a frame is traced: it is not compiled, and neither are those that it was inlined into."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise; a graph break would be too late."""

    def call(prior: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        # Where errors are raised a graph break is all that is left, and the error may come from autograd.
        if variable.value is torch.autograd.grad and config.suppress_errors:
            inputs = (
                kwargs["inputs"] if "inputs" in kwargs else args[_INPUTS] if len(args) > _INPUTS else None
            )
            if any(each.source is None for each in _tensors(inputs)):
                raise GradientsOfResultsError(
                    "the step asks for gradients of what it has computed itself (torch.autograd.grad)"
                )
        return prior(variable, tx, args, kwargs)

    return [Override(TorchInGraphFunctionVariable, "call_function", call)]


def _tensors(inputs: Any) -> Iterator[Any]:
    items = getattr(inputs, "items", None)
    for each in items if isinstance(items, list) else [inputs]:
        found = each.realize() if hasattr(each, "realize") else each
        if isinstance(found, TensorVariable):
            yield found
