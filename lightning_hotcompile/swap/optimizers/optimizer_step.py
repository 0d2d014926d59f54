"""Another update in an optimizer's ``step``, with closure, hooks, profiler and schedulers as before."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as of_all

from lightning_hotcompile.plan.optimizers import MAY_LIE_UNDER


def bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's ``step`` without its wrappers: hooks, profiling, grad mode.

    ``torch.optim`` breaks the graph on purpose where its wrapper switches the grad mode; inside of
    ``torch.no_grad()`` the step itself is one graph.
    """
    step: Callable[[Optimizer], Any] = inspect.unwrap(kind.step)
    return step


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


class ReplacedStep:
    """A ``step`` on the optimizer itself; the closure runs before the update, eagerly.

    Args:
        optimizer: one of ``torch.optim``.
        update: changes the parameters, once their gradients are there.
        is_off: whether a call is to run as if nothing had been replaced.
        may_lie_under: whether a compiled step may be put over this one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        update: Callable[[], None],
        is_off: Callable[[], bool],
        *,
        may_lie_under: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._update = update
        self._is_off = is_off
        self._may_lie_under = may_lie_under

    def put(self) -> Callable[[], bool]:
        """Give the optimizer a ``step`` of its own; what is returned takes it away, if it is on top."""
        optimizer = self._optimizer
        before = vars(optimizer).get("step")
        ours = types.MethodType(self._replacement(optimizer.step), optimizer)
        vars(optimizer)["step"] = ours

        def undo() -> bool:
            if vars(optimizer).get("step") is not ours:
                return False  # wrapped since by somebody: theirs stays, and ours is eager from now on
            if before is None:
                vars(optimizer).pop("step", None)
            else:
                vars(optimizer)["step"] = before
            return True

        return undo

    def _replacement(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        def updated(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._update()
            return loss

        with_hooks = Optimizer.profile_hook_step(updated)
        has_scheduler = bool(getattr(eager, "_wrapped_by_lr_sched", False))

        @functools.wraps(getattr(eager, "__func__", eager))  # of which a method leaves out the first argument
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (
                optimizer is not self._optimizer
                or len(args) + len(kwargs) > 1
                or (kwargs and "closure" not in kwargs)
                or self._is_off()
            ):
                return eager(*args, **kwargs)
            if has_scheduler:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # what it looks for
            if is_watched(optimizer):
                return with_hooks(optimizer, *args, **kwargs)
            loss = updated(optimizer, *args, **kwargs)
            if is_watched(optimizer):  # by a hook that the closure has registered
                for hook in _post_hooks(optimizer):
                    hook(optimizer, (optimizer, *args), kwargs)
            return loss

        if has_scheduler:
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        setattr(step, MAY_LIE_UNDER, id(step) if self._may_lie_under else 0)
        return step
