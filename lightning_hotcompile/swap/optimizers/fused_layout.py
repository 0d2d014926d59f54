"""Whether torch's fused kernels for the CPU may be used on an optimizer's tensors as they are now.

They take parameter, gradient and state for blocks of memory and go through all of them with one index,
whatever their strides are: with a gradient of another layout, one that is expanded, or a parameter that is a
part of something larger, they give wrong results, or read past the end, and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.swap.inductor.layout_checks import guards_of
from lightning_hotcompile.swap.optimizers.fused_kernels import STEP, GroupTensors, kernel_for

DTYPES = (torch.float32, torch.float64)
"""Of weights that these kernels are used for; complex ones they refuse, in the middle of an update."""

_SCALED = ("grad_scale", "found_inf")
"""Attributes of an optimizer by which a gradient scaler has it unscale its gradients."""


class FusedLayout:
    """Looks at the tensors of one optimizer before each update; at rest in one call for all of them.

    Args:
        optimizer: one of those with a fused kernel.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._guards: Any = None
        self._known: list[Any] = []

    def groups(self) -> list[GroupTensors] | None:
        """The tensors for each kernel, or ``None`` if the update is not one for fused kernels.

        None of them where it is not one yet: without any gradient, or without the state that the loop makes.
        """
        groups = self._gathered()
        if not groups:
            return groups
        tensors = [tensor for group in groups for tensor in group.all]
        # Which tensors belong together: that as many are of these layouts is not enough.
        form = [(len(group.parameters), group.kernel.keeps) for group in groups]
        if form != self._known or not self._guards.check(*tensors):
            if not all(map(_are_alike, groups)):
                return None
            self._guards, self._known = guards_of(tensors), form
        return groups

    def _gathered(self) -> list[GroupTensors] | None:
        found, states = [], self._optimizer.state
        name, own = type(self._optimizer).__name__, vars(self._optimizer)
        if any(own.get(attribute) is not None for attribute in _SCALED):
            return None
        for group in self._optimizer.param_groups:
            kernel = None if _asks_for_another_way(group) else kernel_for(name, group)
            if kernel is None:
                return None
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            columns: dict[str, list[Any]] = {each: [] for each in kernel.keeps}
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if columns:
                    state = states.get(parameter)
                    if not state:
                        return []  # the loop makes what is missing
                    for each, column in columns.items():
                        column.append(state.get(each))
                parameters.append(parameter)
                gradients.append(gradient)
            if parameters:
                found.append(GroupTensors(kernel, parameters, gradients, columns))
        return found


def _asks_for_another_way(group: Mapping[str, Any]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    return chosen or bool(group.get("differentiable") or group.get("capturable"))


def _are_alike(group: GroupTensors) -> bool:
    """Whether the kernel gives what the loop gives: it takes all tensors for blocks of one dtype."""
    steps, *others = [group.state.get(STEP, ()), group.gradients]
    others += [column for name, column in group.state.items() if name != STEP]
    if not all(map(_is_plain, group.all)) or any(n.dim() or n.dtype is not torch.float32 for n in steps):
        return False
    dtype = group.parameters[0].dtype
    if dtype not in DTYPES or not all(p.dtype is dtype and _is_dense(p) for p in group.parameters):
        return False
    if len(set(map(id, group.parameters))) < len(group.parameters):
        return False  # the loop updates one that is there twice twice, one after the other
    layouts = list(map(_layout, group.parameters))
    return all(list(map(_layout, column)) == layouts for column in others)


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
