"""Whether torch's fused kernels for the CPU may be used on an optimizer's tensors as they are now.

They take parameter, gradient and state for blocks of memory and go through all of them with one index,
whatever their strides are: with a gradient of another layout, one that is expanded, or a parameter that is a
part of something larger, they give wrong results, or read past the end, and say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.swap.layout_checks import guards_of

_STATE = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adagrad": ("sum",),
    "SGD": (),
}
"""Names of the tensors in an optimizer's state that are as large as the parameter."""

STEP = "step"

DTYPES = (torch.float32, torch.float64)
"""Of weights that these kernels are used for; complex ones they refuse, in the middle of an update."""


def state_names(kind: type[Optimizer], group: dict[str, Any]) -> tuple[str, ...]:
    """What torch keeps for each parameter of this group: tensors of its size, the number of steps last."""
    names = _STATE[kind.__name__]
    counts_steps = bool(names)
    if group.get("amsgrad"):
        names = (*names, "max_exp_avg_sq")
    if group.get("momentum"):
        names = (*names, "momentum_buffer")
    return (*names, STEP) if counts_steps else names


class FusedLayout:
    """Looks at the tensors of one optimizer before each update; at rest in one call for all of them.

    Args:
        optimizer: one of those with a fused kernel.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts_steps = bool(_STATE[type(optimizer).__name__])
        self._guards: Any = None
        self._known = 0

    def changed_tensors(self) -> list[Tensor] | None:
        """The tensors that an update changes, or ``None`` if it is not one for the fused kernel.

        None of them where it is not one yet: without any gradient, or without the state that the loop makes.
        """
        sets = self._sets()
        if not sets:
            return sets
        tensors = [tensor for each in sets for tensor in each]
        if len(tensors) != self._known or not self._guards.check(*tensors):
            if not all(map(self._is_one_layout, sets)):
                return None
            self._guards, self._known = guards_of(tensors), len(tensors)
        return [tensor for each in sets for tensor in (each[0], *each[2:])]

    def _sets(self) -> list[Any] | None:
        """For each parameter with a gradient: it, its gradient, its state, and the number of steps last."""
        found, states = [], self._optimizer.state
        for group in self._optimizer.param_groups:
            names = self._names_in(group)
            if names is None:
                return None
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                each = [parameter, gradient]
                if names:
                    state = states.get(parameter)
                    if not state:
                        return []  # the loop makes what is missing
                    each += [state.get(name) for name in names]
                found.append(each)
        return found

    def _names_in(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        asked_for = group.get("fused") is not None or group.get("foreach") is not None
        if asked_for or group.get("differentiable") or group.get("capturable"):
            return None
        if not isinstance(group["lr"], (int, float)):
            return None
        return state_names(type(self._optimizer), group)

    def _is_one_layout(self, each: Sequence[Any]) -> bool:
        if not all(map(_is_plain, each)):
            return False
        parameter, others = each[0], each[1:]
        if self._counts_steps:
            steps, others = others[-1], others[:-1]
            if steps.dim() or steps.dtype is not torch.float32:
                return False
        layout = _layout(parameter)
        return (
            parameter.dtype in DTYPES
            and _is_dense(parameter)
            and all(_layout(other) == layout for other in others)
        )


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type == "cpu" and not tensor.is_neg() and not tensor.is_conj()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, tensor.dtype, [stride for size, stride in strides if size > 1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0
