"""The optimizer's step, compiled, with closure, hooks, schedulers and state dict as before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import why_not_compiled
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.gradients import with_usual_strides
from lightning_hotcompile.swap.installer import SwappedRegion
from lightning_hotcompile.swap.optimizer_step import ReplacedStep, bare_step
from lightning_hotcompile.swap.witness import Witness

_SMALLEST = torch.finfo(torch.float32).tiny
"""Compiled code divides 32-bit numbers by a rate: a smaller one may be 0 there."""


class LearningRates:
    """Learning rates as tensors while a compiled step runs, as the user's floats otherwise.

    A float would be a constant of the graph, so that each change by a scheduler would recompile.
    The tensors are 64-bit scalars on the CPU: the same numbers that eager multiplies with.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._held: list[float | None] = []
        self._given: list[Any] | None = None

    def as_tensors(self) -> None:
        """Put a tensor in place of each float."""
        groups = self._optimizer.param_groups
        self._given = [group["lr"] for group in groups]
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), dtype=torch.float64))
            self._held.append(None)
        for i, (group, value) in enumerate(zip(groups, self._given, strict=True)):
            if isinstance(value, Tensor):
                continue
            if value != self._held[i]:
                self._tensors[i].fill_(value)
                self._held[i] = value
            group["lr"] = self._tensors[i]

    @property
    def has_zero(self) -> bool:
        """Whether a rate is 0, or so small that 32 bits have no normal number for it.

        Compiled steps divide by it, and weights that never had a gradient would become NaN.
        """
        return any(_is_zero(group["lr"]) for group in self._optimizer.param_groups)

    def as_given(self) -> None:
        """Put the user's values back; a second call does nothing."""
        given, self._given = self._given, None
        for group, value in zip(self._optimizer.param_groups, given or (), strict=False):
            group["lr"] = value


def _is_zero(rate: float | Tensor) -> bool:
    """A tensor on an accelerator is not asked: the step would wait for it, and eager divides by it too."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False
    return abs(float(rate)) < _SMALLEST


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group has of the optimizer's own options, the learning rate left out: plain numbers only."""
    plain = (bool, int, float, tuple)
    return [
        {k: v for k, v in group.items() if k in optimizer.defaults and k != "lr" and isinstance(v, plain)}
        for group in optimizer.param_groups
    ]


_AS_THEY_ARE = contextlib.nullcontext()


class SwappedOptimizer(SwappedRegion):
    """An optimizer whose step is one compiled function; the closure runs before it, eagerly."""

    def __init__(
        self,
        region: Region,
        gate: Gate,
        witness: Witness,
        *,
        optimizer: Optimizer,
        dynamic: bool | None,
    ) -> None:
        # All or nothing: a half-compiled step would meet tensors where eager wants floats.
        super().__init__(region, gate, witness, dynamic=dynamic, fullgraph=True)
        self.optimizer = optimizer
        self._rates = LearningRates(optimizer)
        self._settings_then = _settings(optimizer)
        self._pair: tuple[Callable[[Optimizer], None], CompiledFunction] | None = None
        self.dynamic = dynamic

    def put(self, root: nn.Module) -> None:
        """Give the optimizer a ``step`` of its own; ``take_out`` removes it."""
        optimizer = self.optimizer
        # It may have been wrapped since the plan was made.
        self.error = self.error or why_not_compiled(optimizer) or self._what_moves()
        if self.error is not None:
            return
        if self._pair is None:  # once: what is put in place again finds its compiled code
            self._pair = self._bodies()
        update = functools.partial(self._update, *self._pair)
        step = ReplacedStep(optimizer, update, lambda: self.taken_back is not None or self.is_off())
        self.undo_later(step.put())

    def _what_moves(self) -> str | None:
        """Settings that a schedule changes are constants of the graph: it would compile at each step."""
        if self._pair is not None:
            return None  # it is compiled already, and one change later on is one recompile
        groups = zip(self._settings_then, _settings(self.optimizer), strict=False)
        moved = sorted({name for then, now in groups for name in then if then[name] != now.get(name)})
        return f"its {' and '.join(moved)} changed since training began (a schedule?)" if moved else None

    def _bodies(self) -> tuple[Callable[[Optimizer], None], CompiledFunction]:
        """The step without its wrappers, as it is and compiled."""
        original, rates = bare_step(type(self.optimizer)), self._rates

        def optimizer_step(optimizer: Optimizer) -> None:
            if not torch.compiler.is_compiling():
                rates.as_given()  # this call was not compiled after all: eager takes floats only
            with torch.no_grad():
                original(optimizer)

        return optimizer_step, self.compiled(optimizer_step)

    def _usual_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Dynamo has no guard on strides of gradients: only what is compiled now depends on them."""
        return with_usual_strides(p for group in self.optimizer.param_groups for p in group["params"])

    def _update(self, eager: Callable[[Optimizer], None], compiled: CompiledFunction) -> None:
        if self._rates.has_zero:
            self.calls += 1
            return eager(self.optimizer)
        self._rates.as_tensors()
        try:
            with self._usual_gradients() if self._gate.lane is Lane.COMPILE else _AS_THEY_ARE:
                self.choose(compiled, eager, self.optimizer)
        finally:
            self._rates.as_given()
