"""The state of a thread that captured graphs depend on, and that they hold as operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, autocast and default dtype of a thread.

    Autocast is restored piece by piece and not by entering the precision plugin's context once more: an FP8
    autocast would take that for a step and move its scales.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype

    @classmethod
    def now(cls) -> ThreadState:
        """Read it."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple(
                (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set it, and afterwards what was before."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    cache = self.autocast_cache
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            yield

    def put_back(self) -> None:
        """Set it for good, where no context would."""
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.set_grad_enabled(self.grad_enabled)
        torch.set_default_dtype(self.default_dtype)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast inside, on any device."""
    with contextlib.ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Autocast keeps no casts of what is used inside.

    A cast holds what it was made of, and is kept until the outermost autocast ends: copies of weights that
    are used once would stay until then.
    """
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextlib.contextmanager
def put_back_after_errors() -> Iterator[None]:
    """After an error inside the thread is as it was before.

    In a captured graph a ``with`` of the user's is two operations, one to enter and one to leave. Whatever
    runs the graph, a backend that traces it included, and fails between the two has entered only: autocast
    that stays nested never drops its copies of weights, so later steps would compute with old ones.
    """
    state, nesting = ThreadState.now(), _autocast_nesting()
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        _leave_transforms(levels)
        if hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(hooks)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()
        if nesting == 0:
            torch.clear_autocast_cache()
        state.put_back()
        raise


def _leave_transforms(levels: int) -> None:
    """Back to so many of ``torch.func``'s transforms.

    One by one: with torch 2.11 ``pop_dynamic_layer_stack_and_undo_to_depth`` ends in an internal error.
    """
    functorch = torch._C._functorch
    kinds = functorch.TransformType
    leave = {
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Functionalize: functorch._func_decrement_nesting,
    }
    while functorch.get_dynamic_layer_stack_depth() > levels:
        leave[functorch.peek_interpreter_stack().key()]()


def _autocast_nesting() -> int:
    """How many autocasts the thread is in."""
    inside = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inside - 1
