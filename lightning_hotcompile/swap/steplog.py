"""A compiled ``training_step`` whose ``self.log`` calls are collected and made afterwards."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hotcompile.swap.dynamo import dynamic_integers
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.installer import SwappedRegion

_CALLS = "_hotcompile_log_calls"
_LOGGING_METHODS = ("log", "log_dict")

# The Trainer's counters behind self.global_step and self.current_epoch change from step to step:
# as constants in a graph each of them would mean a recompile.
_TRAINER_COUNTERS = (
    r".*_trainer\.fit_loop\..*\.(completed|processed|ready|started)$",
    r".*\._batches_that_stepped$",
)


def _recorder(name: str) -> Callable[..., None]:
    """A method that stands in for ``self.log`` and only remembers the call."""

    def record(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        keep_graph = kwargs.get("enable_graph", False)
        snapshot_args = [_snapshot(a, keep_graph) for a in args]
        snapshot_kwargs = {k: _snapshot(v, keep_graph) for k, v in kwargs.items()}
        getattr(self, _CALLS).append((name, snapshot_args, snapshot_kwargs))

    return record


def _snapshot(value: Any, keep_graph: bool) -> Any:
    """The value as it is now: the step may change it in place before the call is replayed."""
    if isinstance(value, Tensor):
        return value.clone() if keep_graph else value.detach().clone()
    if type(value) is dict:
        return {k: _snapshot(v, keep_graph) for k, v in value.items()}
    return value


_RECORDERS = {name: _recorder(name) for name in _LOGGING_METHODS}


@contextmanager
def recorded_logs(module: LightningModule) -> Iterator[None]:
    """``self.log`` and ``self.log_dict`` are collected, and replayed in order at the end.

    The list is a new one each time: Dynamo guards on its length, so one that is not empty at the
    entry would mean a recompile on each step. Also after an exception, what was logged before it
    is logged.
    """
    calls: list[tuple[str, list[Any], dict[str, Any]]] = []
    attributes = vars(module)
    before = {name: attributes[name] for name in _LOGGING_METHODS if name in attributes}
    attributes[_CALLS] = calls
    attributes.update({name: types.MethodType(r, module) for name, r in _RECORDERS.items()})
    try:
        yield
    finally:
        for name in (*_LOGGING_METHODS, _CALLS):
            attributes.pop(name, None)
        attributes.update(before)
        for name, args, kwargs in calls:
            getattr(module, name)(*args, **kwargs)


def _integer_sources(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Dynamo's names of the integer arguments (``batch_idx``), as patterns."""
    names = [f"L['args'][{i}]" for i, a in enumerate(args) if type(a) is int]
    names += [f"L['kwargs']['{k}']" for k, a in kwargs.items() if type(a) is int]
    return [re.escape(n) + "$" for n in names]


class SwappedStep(SwappedRegion):
    """The whole ``training_step`` as one region.

    ``self.log`` inside a compiled step would be an internal error of Dynamo, or a graph break.
    """

    def put(self, root: torch.nn.Module) -> None:
        """Give the module a ``training_step`` of its own; ``take_out`` removes it."""
        assert isinstance(root, LightningModule)
        attributes = vars(root)
        before = attributes.get("training_step")
        attributes["training_step"] = types.MethodType(self._replacement(root, before), root)

        def undo() -> None:
            if before is None:
                attributes.pop("training_step", None)
            else:
                attributes["training_step"] = before

        self.undo_later(undo)

    def _replacement(self, root: LightningModule, before: Any) -> Callable[..., Any]:
        original = type(root).training_step if before is None else _ignoring_self(before)

        def step_body(module: LightningModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return original(module, *args, **kwargs)

        compiled = self.compiled(step_body)

        @functools.wraps(root.training_step)
        def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if module is not root or self.error is not None or not self._gate.compiled:
                return original(module, *args, **kwargs)  # a copy of the module runs as if never swapped
            with recorded_logs(module):
                if self._gate.lane is not Lane.COMPILE:
                    return self.choose(compiled, step_body, module, args, kwargs)
                with dynamic_integers([*_integer_sources(args, kwargs), *_TRAINER_COUNTERS]):
                    return self.choose(compiled, step_body, module, args, kwargs)

        return training_step


def _ignoring_self(bound: Callable[..., Any]) -> Callable[..., Any]:
    def unbound(_: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return unbound
