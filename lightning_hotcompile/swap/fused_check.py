"""Whether torch's fused kernel makes the update that the loop makes, on the same weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.swap.fused_layout import state_names
from lightning_hotcompile.swap.optimizer_step import bare_step

MOST_ELEMENTS = 5_000_000
"""Elements of parameters that are copied, those of the groups in equal shares."""

TOLERANCE = 1e-4
"""How far an update may be from that of the loop, over its own norm."""


class FusedCheck:
    """One update by the kernel on copies, made before the loop makes it in the training.

    Of a large parameter a part is copied: the update treats each element alike. Of the state only what torch
    keeps there itself.

    Args:
        optimizer: one whose tensors are for the kernel; it is read only.
        most: elements of all parameters that are copied.
    """

    def __init__(self, optimizer: Optimizer, most: int = MOST_ELEMENTS) -> None:
        self._optimizer = optimizer
        self._copied: list[tuple[Tensor, int, tuple[str, ...]]] = []
        groups = []
        for group in optimizer.param_groups:
            names = state_names(type(optimizer), group)
            chosen = list(_within(most // len(optimizer.param_groups), group["params"]))
            self._copied += [(parameter, n, names) for parameter, n in chosen]
            settings = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach")}
            if chosen:
                copies = [_copy_of(parameter, n) for parameter, n in chosen]
                groups.append({**settings, "fused": True, "params": copies})
        kind: Any = type(optimizer)
        self._copy: Optimizer = kind(groups, lr=float(optimizer.param_groups[0]["lr"]))
        for copy, (parameter, n, names) in zip(self._copies, self._copied, strict=True):
            if names:
                state = optimizer.state[parameter]
                self._copy.state[copy] = {name: _part(state[name], n).clone() for name in names}
        self._before = [tensor.clone() for tensor in self._originals()]
        with torch.no_grad():
            bare_step(kind)(self._copy)

    def agrees(self) -> bool | None:
        """After the loop's update: whether both are the same but for rounding.

        ``None`` where this one is no measure: it is not finite, or moves no weight.
        """
        loop, fused = list(self._originals()), list(self._results())
        apart = [float(n) for n in torch._foreach_norm(torch._foreach_sub(loop, fused))]
        moved = [float(n) for n in torch._foreach_norm(torch._foreach_sub(loop, self._before))]
        norms = [float(n) for n in torch._foreach_norm(loop)]
        if not all(map(math.isfinite, (*moved, *norms))) or not any(moved[: len(self._copied)]):
            return None
        rounding = [2 * torch.finfo(tensor.dtype).eps for tensor in loop]
        return all(
            a <= TOLERANCE * m + eps * n for a, m, n, eps in zip(apart, moved, norms, rounding, strict=True)
        )

    @property
    def _copies(self) -> list[Tensor]:
        return [parameter for group in self._copy.param_groups for parameter in group["params"]]

    def _originals(self) -> Iterator[Tensor]:
        """The parts of the parameters that were copied, then those of their state."""
        yield from (_part(parameter, n) for parameter, n, _ in self._copied)
        for parameter, n, names in self._copied:
            yield from (_part(self._optimizer.state[parameter][name], n) for name in names)

    def _results(self) -> Iterator[Tensor]:
        """The same of the copies."""
        yield from (copy.detach() for copy in self._copies)
        for copy, (_, _, names) in zip(self._copies, self._copied, strict=True):
            yield from (self._copy.state[copy][name] for name in names)


def _within(most: int, parameters: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Parameters with a gradient, the smallest first, each with how many of its elements are copied."""
    for parameter in sorted((p for p in parameters if p.grad is not None), key=Tensor.numel):
        n = min(parameter.numel(), most)
        most -= n
        if n:
            yield parameter, n


def _copy_of(parameter: Tensor, n: int) -> Tensor:
    copy = torch.nn.Parameter(_part(parameter, n).clone())
    assert parameter.grad is not None
    copy.grad = _part(parameter.grad, n).clone()
    return copy


def _part(tensor: Tensor, n: int) -> Tensor:
    """The first elements in the order of indices; a number of steps as it is."""
    return tensor.detach().reshape(-1)[:n] if tensor.dim() else tensor.detach()
