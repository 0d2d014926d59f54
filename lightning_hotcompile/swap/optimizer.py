"""The optimizer's step, compiled, with closure, hooks, schedulers and state dict as before."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_all

from lightning_hotcompile.plan.optimizers import why_not_compiled
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.gradients import with_usual_strides
from lightning_hotcompile.swap.installer import SwappedRegion
from lightning_hotcompile.swap.witness import Witness


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

    def as_given(self) -> None:
        """Put the user's values back; a second call does nothing."""
        given, self._given = self._given, None
        for group, value in zip(self._optimizer.param_groups, given or (), strict=False):
            group["lr"] = value


def bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's ``step`` without its wrappers: hooks, profiling, grad mode.

    ``torch.optim`` breaks the graph on purpose where its wrapper switches the grad mode; inside of
    ``torch.no_grad()`` the step itself is one graph.
    """
    step: Callable[[Optimizer], Any] = inspect.unwrap(kind.step)
    return step


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group has of the optimizer's own options, the learning rate left out: plain numbers only."""
    plain = (bool, int, float, tuple)
    return [
        {k: v for k, v in group.items() if k in optimizer.defaults and k != "lr" and isinstance(v, plain)}
        for group in optimizer.param_groups
    ]


_AS_THEY_ARE = contextlib.nullcontext()


def is_watched(optimizer: Optimizer) -> bool:
    """Whether hooks or a profiler are told of this optimizer's steps."""
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
    )


def _post_hooks(optimizer: Optimizer) -> list[Callable[..., None]]:
    return [*optimizer._optimizer_step_post_hooks.values(), *of_all._global_optimizer_post_hooks.values()]


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
        before = vars(optimizer).get("step")
        eager = optimizer.step
        ours = types.MethodType(self._replacement(eager), optimizer)
        vars(optimizer)["step"] = ours

        def undo() -> None:
            if vars(optimizer).get("step") is not ours:
                return  # wrapped since by somebody: theirs stays, and ours is eager from now on
            if before is None:
                vars(optimizer).pop("step", None)
            else:
                vars(optimizer)["step"] = before

        self.undo_later(undo)

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

    def _replacement(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        rates = self._rates
        if self._pair is None:  # once: what is put in place again finds its compiled code
            self._pair = self._bodies()
        optimizer_step, compiled = self._pair

        def compiled_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            rates.as_tensors()
            try:
                with self._usual_gradients() if self._gate.lane is Lane.COMPILE else _AS_THEY_ARE:
                    self.choose(compiled, optimizer_step, optimizer)
            finally:
                rates.as_given()
            return loss

        with_hooks = Optimizer.profile_hook_step(compiled_step)

        @functools.wraps(eager)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (
                optimizer is not self.optimizer
                or len(args) + len(kwargs) > 1
                or (kwargs and "closure" not in kwargs)
                or self.taken_back is not None
                or self.is_off()
            ):
                return eager(*args, **kwargs)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for
            if is_watched(optimizer):
                return with_hooks(optimizer, *args, **kwargs)
            loss = compiled_step(optimizer, *args, **kwargs)
            if is_watched(optimizer):  # by a hook that the closure has registered
                for hook in _post_hooks(optimizer):
                    hook(optimizer, (optimizer, *args), kwargs)
            return loss

        if getattr(eager, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step
