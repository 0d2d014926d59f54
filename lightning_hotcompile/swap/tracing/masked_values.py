"""``hidden[mask] = self.token``: what a mask chooses is set to a value that is trained.

Its gradient is that of the rows which the mask chooses, and how many these are AOTAutograd cannot tell: it
raises, and the frame is left to eager, mostly the whole step. Masked pretraining (BERT, wav2vec 2.0, MAE)
does so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import BaseListVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_WHAT = "value with a gradient at the places of a mask"
_WHY = "Compiled code cannot tell how many places there are, as the gradient would need."


def overrides() -> list[Override]:
    """What Dynamo does otherwise: the same value for all places is one of two that ``torch.where`` chooses.

    A value for each place is set by Python, at a graph break.
    """

    def set_item(prior: Any, variable: Any, tx: Any, key: Any, value: Any) -> Any:
        if not (torch.is_grad_enabled() and has_gradient(value) and _has_mask(key)):
            return prior(variable, tx, key, value)
        into, mask, new = map(_example, (variable, key, value))
        if type(variable) is not TensorVariable or mask is None or not _is_same_everywhere(into, mask, new):
            end_graph(_WHAT, f"{variable} {key} {value}", _WHY)
        return VariableTracker.build(tx, _set_where).call_function(tx, [variable, key, value], {})

    return [Override(TensorVariable, "method___setitem__", set_item)]


def _set_where(into: Tensor, mask: Tensor, value: Tensor) -> None:
    while mask.ndim < into.ndim:
        mask = mask.unsqueeze(-1)
    into.copy_(torch.where(mask, value, into))


def _example(variable: Any) -> Tensor | None:
    """The tensor without values that stands for a variable, ``None`` of one that is no tensor."""
    found = variable.realize()
    if not isinstance(found, TensorVariable):
        return None
    example: Tensor = found.as_proxy().node.meta["example_value"]
    return example


def has_gradient(variable: Any) -> bool:
    """Whether it is a tensor that a backward would come to."""
    found = _example(variable)
    return found is not None and found.requires_grad


def _has_mask(key: Any) -> bool:
    key = key.realize()
    parts = key.items if isinstance(key, BaseListVariable) else [key]
    return any((found := _example(part)) is not None and found.dtype is torch.bool for part in parts)


def _is_same_everywhere(into: Tensor | None, mask: Tensor, value: Tensor | None) -> bool:
    """Whether a value has no dimension for the places, so that it is the same one at each of them."""
    if into is None or value is None or value.ndim > into.ndim - mask.ndim:
        return False
    fits = into.shape[: mask.ndim] == mask.shape  # else Python is to say what is wrong: this would broadcast
    return fits and into.dtype is value.dtype and into.device == value.device
