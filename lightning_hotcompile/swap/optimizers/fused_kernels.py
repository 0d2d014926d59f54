"""torch's fused kernels for the CPU, called at once with all tensors of a parameter group.

With ``fused=True`` torch calls the same kernels, but first it gathers the tensors, sorts them by device and
dtype, and counts the steps by adding a Python number, of which a tensor is made for each of them. For 96
tensors of a small model that takes longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEP = "step"
"""Name in an optimizer's state of a parameter's number of steps."""

_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", STEP)
_TAKES = {"Adam": _ADAM, "AdamW": _ADAM, "Adagrad": ("sum", STEP), "SGD": ("momentum_buffer",)}
"""Names of an optimizer's state, in the order in which its kernel takes them."""

_ONLY_WITH = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum"}
"""The setting without which there is no such state; the kernel takes an empty list for it."""

_SETTINGS = {
    "Adam": ("lr", "weight_decay", "eps", "maximize", "amsgrad"),
    "Adagrad": ("lr", "weight_decay", "eps", "maximize", "lr_decay"),
    "SGD": ("lr", "weight_decay", "maximize", "momentum", "dampening", "nesterov"),
}

_TYPES = dict.fromkeys(("maximize", "amsgrad", "nesterov"), bool)
"""Of settings that are no numbers: the loop takes others for true, too, and the kernel raises."""


@dataclass(frozen=True)
class Kernel:
    """The kernel for one parameter group."""

    name: str
    """In ``torch``."""

    takes: tuple[str, ...]
    """Names of state, in the order in which it takes them."""

    keeps: tuple[str, ...]
    """Those of them that a parameter of this group has."""

    settings: Mapping[str, float]


def kernel_for(optimizer: str, group: Mapping[str, Any]) -> Kernel | None:
    """The kernel that updates this group, or ``None`` if one of its settings is none that it takes.

    Args:
        optimizer: name of a class with a fused kernel.
        group: one of its parameter groups.
    """
    is_adam = optimizer.startswith("Adam")
    settings = {name: group[name] for name in _SETTINGS["Adam" if is_adam else optimizer]}
    if is_adam:
        settings["beta1"], settings["beta2"] = group["betas"]
    if not all(isinstance(value, _TYPES.get(name, (int, float))) for name, value in settings.items()):
        return None
    if optimizer == "SGD":
        settings["is_first_step"] = False  # it makes the momentum: that is left to the loop
    takes = _TAKES[optimizer]
    return Kernel(
        name=f"_fused_{_kernel_name(optimizer, group)}_",
        takes=takes,
        keeps=tuple(name for name in takes if name not in _ONLY_WITH or group[_ONLY_WITH[name]]),
        settings=settings,
    )


def _kernel_name(optimizer: str, group: Mapping[str, Any]) -> str:
    if optimizer.startswith("Adam"):
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    return optimizer.lower()


@dataclass(frozen=True)
class GroupTensors:
    """The tensors that one kernel is called with, in columns of one length."""

    kernel: Kernel
    parameters: list[Tensor]
    gradients: list[Tensor]
    state: Mapping[str, list[Tensor]]
    """By the names that the kernel ``keeps``."""

    @property
    def changed(self) -> list[Tensor]:
        """What an update changes."""
        return [*self.parameters, *(tensor for column in self.state.values() for tensor in column)]

    @property
    def all(self) -> list[Tensor]:
        """The columns, one after the other: parameters, gradients, state."""
        state = (tensor for column in self.state.values() for tensor in column)
        return [*self.parameters, *self.gradients, *state]

    def mapped(self, change: Callable[[list[Tensor]], list[Tensor]]) -> GroupTensors:
        """The same with each column changed."""
        state = {name: change(column) for name, column in self.state.items()}
        return GroupTensors(self.kernel, change(self.parameters), change(self.gradients), state)

    def update(self) -> None:
        """One update, in place: call it where no gradients are recorded.

        All tensors have to be of one dtype and to lie alike in memory, see
        :class:`~lightning_hotcompile.swap.optimizers.fused_layout.FusedLayout`. Versions of parameters are
        not counted.
        """
        kernel, state = self.kernel, self.state
        if STEP in state:
            one = torch.ones((), dtype=torch.float32, device="cpu")  # as the numbers of steps are
            torch._foreach_add_(state[STEP], one, alpha=1)
        columns = [state.get(name, ()) for name in kernel.takes]
        getattr(torch, kernel.name)(self.parameters, self.gradients, *columns, **kernel.settings)
