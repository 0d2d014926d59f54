"""Whether torch's fused kernel makes the update that the loop makes, on the same weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_hotcompile.swap.optimizers.fused_kernels import GroupTensors

MOST_ELEMENTS = 5_000_000
"""Elements of parameters that are copied, those of the groups in equal shares."""

TOLERANCE = 1e-4
"""How far an update may be from that of the loop, over its own norm."""


class FusedCheck:
    """One update by the kernel on copies, made before the loop makes it in the training.

    Of a large parameter a part is copied: the update treats each element alike. Of the state only what torch
    keeps there itself.

    Args:
        groups: tensors that are for the kernel; they are read only.
        most: elements of all parameters that are copied.
    """

    def __init__(self, groups: Sequence[GroupTensors], most: int = MOST_ELEMENTS) -> None:
        self._groups = groups
        self._most = most // len(groups)
        copies, before = list(map(_cloned, self._parts())), list(map(_cloned, self._parts()))
        with torch.no_grad():
            for copy in copies:
                copy.update()
        self._results, self._before = _parameters_first(copies), _parameters_first(before)
        self._weights = sum(len(copy.parameters) for copy in copies)

    def agrees(self) -> bool | None:
        """After the loop's update: whether both are the same but for rounding.

        ``None`` where this one is no measure: it is not finite, or moves no weight.
        """
        loop, fused = _parameters_first(self._parts()), self._results
        apart = [float(n) for n in torch._foreach_norm(torch._foreach_sub(loop, fused))]
        moved = [float(n) for n in torch._foreach_norm(torch._foreach_sub(loop, self._before))]
        norms = [float(n) for n in torch._foreach_norm(loop)]
        if not all(map(math.isfinite, (*moved, *norms))) or not any(moved[: self._weights]):
            return None
        rounding = [2 * torch.finfo(tensor.dtype).eps for tensor in loop]
        return all(
            a <= TOLERANCE * m + eps * n for a, m, n, eps in zip(apart, moved, norms, rounding, strict=True)
        )

    def _parts(self) -> list[GroupTensors]:
        """As they are now."""
        parts = (_first_of(group, self._most) for group in self._groups)
        return [part for part in parts if part is not None]


def _parameters_first(groups: Sequence[GroupTensors]) -> list[Tensor]:
    """All parameters, then the state of all."""
    state = [tensor for group in groups for column in group.state.values() for tensor in column]
    return [tensor for group in groups for tensor in group.parameters] + state


def _first_of(group: GroupTensors, most: int) -> GroupTensors | None:
    """The first elements of its tensors, the smallest parameters first; ``None`` where that is none."""
    chosen = list(_within(most, group.parameters))
    if not chosen:
        return None
    return group.mapped(lambda column: [_part(column[index], n) for index, n in chosen])


def _within(most: int, parameters: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The indices of parameters, the smallest first, each with how many of its elements are taken."""
    for index in sorted(range(len(parameters)), key=lambda i: parameters[i].numel()):
        n = min(parameters[index].numel(), most)
        most -= n
        if n:
            yield index, n


def _cloned(group: GroupTensors) -> GroupTensors:
    return group.mapped(lambda column: [tensor.clone() for tensor in column])


def _part(tensor: Tensor, n: int) -> Tensor:
    """The first elements as they lie in memory, without a copy of all; a number of steps as it is."""
    return tensor.detach().as_strided((n,), (1,)) if tensor.dim() else tensor.detach()
