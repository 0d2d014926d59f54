"""Compile a region before its next real call, on inputs that were captured in an eager step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Capture:
    """The inputs of one call of a module, and the state it was called under.

    Tensors share memory with those of the step, detached, with the same ``requires_grad``. The state
    is restored piece by piece and not by entering the precision plugin's context once more: an FP8
    autocast would take the warm-up for a step and move its scales.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        """Record a call that is about to happen."""
        return cls(
            args=tree_map(_detached, args),
            kwargs=tree_map(_detached, kwargs),
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple(
                (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def state(self) -> Iterator[None]:
        """The grad mode, autocast state and default dtype of the captured call."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    cache = self.autocast_cache
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            yield


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class InputRecorder:
    """Forward pre-hooks that record the first call of each given module in one step.

    The hooks must be gone before anything is compiled: a hook left on a compiled module is
    compiled as one more frame.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.captures: dict[str, Capture] = {}
        self._handles: list[RemovableHandle] = [
            m.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, m in modules
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self.captures:
                self.captures[name] = Capture.of(args, kwargs)

        return record

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@contextlib.contextmanager
def nothing_changed(module: nn.Module) -> Iterator[None]:
    """Random state, buffers and plain attributes of a module are afterwards as before."""
    devices = sorted({t.device.index or 0 for t in module.parameters() if t.device.type == "cuda"})
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    attributes = [_Attributes(m) for m in module.modules()]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for saved in attributes:
            saved.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class _Attributes:
    """The user's attributes of one module: counters, lists, caches. Untouched if nothing changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = self._current()
        self._contents = {k: copy.copy(v) for k, v in self._values.items() if type(v) in (list, dict, set)}

    def _current(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self._module).items() if k not in _OWN_ATTRIBUTES}

    def restore(self) -> None:
        present = vars(self._module)
        for name in self._current().keys() - self._values.keys():
            del present[name]
        for name, value in self._values.items():
            if present.get(name, self) is not value:
                present[name] = value
        for name, before in self._contents.items():
            _restore_contents(self._values[name], before)


def _restore_contents(container: Any, before: Any) -> None:
    """In place, since others may hold the same list; compared by identity, since tensors have no ``==``."""
    now = container.items() if isinstance(container, dict) else container
    then = before.items() if isinstance(before, dict) else before
    same = len(now) == len(then) and all(
        a is b or (isinstance(a, tuple) and all(x is y for x, y in zip(a, b, strict=False)))
        for a, b in zip(now, then, strict=True)
    )
    if not same:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(before)


def warm_up(module: nn.Module, capture: Capture) -> None:
    """Call a swapped module once on captured inputs, forward and backward.

    Gradients of parameters, buffers, random state and attributes stay as they were.
    """
    with nothing_changed(module), capture.state():
        output = module(*capture.args, **capture.kwargs)
        if not capture.grad_enabled:
            return
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        inputs = [t for t in tree_leaves((capture.args, capture.kwargs)) if isinstance(t, Tensor)]
        wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
        if outputs and wanted:
            cotangents = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
