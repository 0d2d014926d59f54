"""Copies of optimizers, to run on them what is not to be seen in the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def fused_copy(optimizer: Any, most: int) -> tuple[Optimizer, list[Tensor]]:
    """A fused optimizer of the same kind and state, with parameters and gradients of its own.

    Args:
        optimizer: one of ``torch.optim``; it is read only.
        most: elements of all parameters that are copied; of each group the smallest ones that fit, but one
            parameter at least.

    Returns:
        The copy, and the parameters that were copied, in its order.
    """
    groups, left, chosen = [], most, list[Tensor]()
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach")}
        mine: list[Tensor] = []
        for parameter in sorted(group["params"], key=Tensor.numel):
            if parameter.numel() <= left or not (mine or chosen):
                left -= parameter.numel()
                mine.append(parameter)
        chosen += mine
        if mine:
            groups.append({**settings, "fused": True, "params": [_copied(p) for p in mine]})
    rate = float(optimizer.param_groups[0]["lr"])
    made: Optimizer = type(optimizer)(groups, lr=rate)
    copies = [p for group in made.param_groups for p in group["params"]]
    for parameter, copy in zip(chosen, copies, strict=True):
        if parameter in optimizer.state:
            made.state[copy] = {k: _alike(v) for k, v in optimizer.state[parameter].items()}
    return made, chosen


def _copied(parameter: Tensor) -> Tensor:
    copy = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        copy.grad = parameter.grad.detach().clone()
    return copy


def _alike(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
