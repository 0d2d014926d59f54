"""What torch's own fused optimizer would take, timed on copies: sometimes it beats the compiled one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import why_not_fused
from lightning_hotcompile.swap.fused_layout import FusedLayout
from lightning_hotcompile.swap.optimizer_copy import copy_of
from lightning_hotcompile.swap.optimizer_step import bare_step

MOST_ELEMENTS = 5_000_000
"""With more weights than these the copies would take time and memory that the run can use better."""

_WARM_UP, _ROUNDS = 2, 7


@dataclass(frozen=True, kw_only=True)
class FusedTrial:
    """Seconds of one optimizer step without the rest of the training step."""

    name: str
    eager_s: float
    fused_s: float

    def advice(self, compiled_saves_s: float, step_s: float) -> str | None:
        """A sentence if fused saves clearly more of a step than compiling the optimizer does, else ``None``.

        Args:
            compiled_saves_s: seconds of a step that the compiled optimizer saves; 0 if it is not compiled.
            step_s: seconds of a step.
        """
        saves = self.eager_s - self.fused_s
        if saves <= max(0.0, compiled_saves_s) + _WORTH_A_WORD * step_s:
            return None
        compiled = f"{1e3 * compiled_saves_s:.2g} ms" if compiled_saves_s > 0 else "nothing"
        return (
            f"{self.name}(..., fused=True) would save {1e3 * saves:.2g} ms of each step "
            f"({1e3 * self.eager_s:.2g} ms eager, {1e3 * self.fused_s:.2g} ms fused, timed on copies); "
            f"compiling the optimizer saves {compiled}"
        )


_WORTH_A_WORD = 0.02
"""Share of a step that has to be gained before anybody is told."""


def try_fused(optimizer: Any, now: Callable[[], float] = time.perf_counter) -> FusedTrial | None:
    """Time steps of copies of an optimizer, eager and fused in turn; ``None`` where that says nothing.

    The optimizer, its parameters and their gradients are read only. Only on the CPU, where no
    synchronization is needed to time it.
    """
    if not _says_something(optimizer):
        return None
    eager, fused = (copy_of(optimizer, fused=fused)[0] for fused in (None, True))
    times: dict[Optimizer, list[float]] = {eager: [], fused: []}
    for _ in range(_WARM_UP + _ROUNDS):
        for copy, seconds in times.items():
            start = now()
            with torch.no_grad():
                bare_step(type(copy))(copy)  # hooks of the user's for all optimizers are not for copies
            seconds.append(now() - start)
    kept = {copy: median(seconds[_WARM_UP:]) for copy, seconds in times.items()}
    return FusedTrial(name=type(optimizer).__name__, eager_s=kept[eager], fused_s=kept[fused])


def _says_something(optimizer: Any) -> bool:
    if why_not_fused(optimizer) is not None or FusedLayout(optimizer).changed_tensors() is None:
        return False
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return bool(elements <= MOST_ELEMENTS)
