"""A step that looks at its optimizer's settings finds them as they are.

So that it can compile an optimizer's step Dynamo takes ``capturable`` to be set wherever anybody asks for
``param_groups``, and marks each parameter as one that stays where it is. A training step that sets the
learning rate by hand would write that into the groups as well: updates on a CPU raise then, and checkpoints
keep it.
"""

from __future__ import annotations

import os
from typing import Any

import torch.optim
from torch._dynamo.variables import OptimizerVariable

from lightning_hotcompile.swap.tracing.overrides import Override, traced_now

_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def attribute(prior: Any, variable: Any, tx: Any, name: str) -> Any:
        if name == "param_groups" and not _is_an_optimizers(tx):
            return super(OptimizerVariable, variable).var_getattr(tx, name)
        return prior(variable, tx, name)

    def getter(prior: Any, variable: Any, name: str) -> Any:
        if name == "param_groups" and not _is_an_optimizers(traced_now().output.current_tx):
            return None
        return prior(variable, name)

    if hasattr(OptimizerVariable, "var_getattr"):
        return [Override(OptimizerVariable, "var_getattr", attribute)]
    return [Override(OptimizerVariable, "lookup_tp_getset_member", getter)]  # from torch 2.14 on


def _is_an_optimizers(tx: Any) -> bool:
    """Whether the function that is traced is one of torch's optimizers'."""
    return bool(tx.f_code.co_filename.startswith(_OPTIMIZERS))
