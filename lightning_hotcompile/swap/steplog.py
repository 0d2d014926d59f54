"""A compiled ``training_step`` whose ``self.log`` calls are collected and made afterwards."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_hotcompile.either_lightning import lightning_base
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.covers import cover, uncover
from lightning_hotcompile.swap.dynamo import dynamic_integers
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.ranks import has_other_ranks
from lightning_hotcompile.swap.step_method import (
    ClassMethods,
    give_back,
    ignoring_self,
    integer_sources,
    is_method_of,
    looking_like,
    marked,
    method_of_class,
    source_of,
)
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from lightning_hotcompile.swap.tracing.inlined_only import inlined_only

_CALLS = "_hotcompile_log_calls"
_LOGGING_METHODS = ("log", "log_dict")
_OF_LIGHTNING = "/dataloader_idx_"  # what Lightning adds to names, and refuses in those of others
_ON_STEP, _ENABLE_GRAPH, _SYNC_DIST = 2, 5, 6  # their places among the arguments after the value

# The Trainer's counters behind self.global_step and self.current_epoch change from step to step:
# as constants in a graph each of them would mean a recompile.
_TRAINER_COUNTERS = (
    r".*_trainer\.fit_loop\..*\.(completed|processed|ready|started)$",
    r".*\._batches_that_stepped$",
)

StandIns = Mapping[str, Callable[..., Any]]


@inlined_only
def _log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for ``LightningModule.log``."""
    keep_graph = _keeps_graph(args, kwargs)
    getattr(self, _CALLS).append(("log", (name, _snapshot(value, keep_graph), *args), kwargs))
    if not (_is_allowed(name) and _can_wait(value)):
        _make_calls(self)


@inlined_only
def _log_dict(self: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for ``LightningModule.log_dict``."""
    keep_graph = _keeps_graph(args, kwargs)
    getattr(self, _CALLS).append(("log_dict", (_snapshot(dictionary, keep_graph), *args), kwargs))
    if not (isinstance(dictionary, Mapping) and all(map(_is_allowed, dictionary)) and _can_wait(dictionary)):
        _make_calls(self)


@inlined_only
def _log_among_ranks(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    _log(self, name, value, *args, **kwargs)
    if _is_reduced(args, kwargs):
        _make_calls(self)


@inlined_only
def _log_dict_among_ranks(self: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
    _log_dict(self, dictionary, *args, **kwargs)
    if _is_reduced(args, kwargs):
        _make_calls(self)


_RECORDERS: dict[str, Callable[..., None]] = {"log": _log, "log_dict": _log_dict}
_AMONG_RANKS: dict[str, Callable[..., None]] = {"log": _log_among_ranks, "log_dict": _log_dict_among_ranks}


def _is_reduced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Lightning reduces the value over all ranks in the call, and not at the end of the epoch.

    A rank whose step runs eagerly does so at this place, and the step may have collectives of its own: all
    ranks have to come to all of them in the same order.
    """
    synced = _argument(args, kwargs, _SYNC_DIST, "sync_dist", False)
    return bool(synced) and _argument(args, kwargs, _ON_STEP, "on_step", None) is not False


def _keeps_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _argument(args, kwargs, _ENABLE_GRAPH, "enable_graph", False)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _snapshot(value: Any, keep_graph: Any) -> Any:
    """The value as it is now: the step may change it in place before the call is made."""
    if isinstance(value, Tensor):
        return value.clone() if keep_graph else value.detach().clone()
    if isinstance(value, Mapping):
        return {k: _snapshot(v, keep_graph) for k, v in value.items()}
    return value


def _is_allowed(name: Any) -> bool:
    return isinstance(name, str) and _OF_LIGHTNING not in name


def _can_wait(value: Any) -> bool:
    """Whether it makes no difference to Lightning that a value is logged at the end of the step.

    A metric object is logged with the value of its last call, which may not be its last in the step;
    what Lightning refuses has to be refused in the step, which may catch the error.
    """
    if isinstance(value, (Tensor, np.ndarray)):  # to Dynamo a NumPy number is an array
        return value.numel() == 1 if isinstance(value, Tensor) else value.ndim == 0
    if isinstance(value, Mapping):
        return all(not isinstance(v, Mapping) and _can_wait(v) for v in value.values())
    return isinstance(value, (int, float))


@torch.compiler.disable(reason="self.log has to be called at once")  # type: ignore[untyped-decorator, no-untyped-call]
def _make_calls(module: LightningModule) -> None:
    """Make the calls that were collected so far, in order, in the middle of the step."""
    pending: list[Any] = getattr(module, _CALLS)
    calls = pending[:]
    pending.clear()
    for name, args, kwargs in calls:
        getattr(lightning_base(module), name)(module, *map(_as_numbers, args), **kwargs)


def _as_numbers(value: Any) -> Any:
    """NumPy's numbers as they were before Dynamo made arrays of them, which Lightning would refuse."""
    if type(value) is dict:
        return {k: _as_numbers(v) for k, v in value.items()}
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def stand_ins(module: LightningModule) -> StandIns:
    """What takes the place of ``self.log`` and ``self.log_dict`` in a compiled step.

    Lightning's own methods have no effect on the rest of the step, so their calls are collected. A
    method that the user wrote may have one, so it is called at once, at the price of a graph break;
    and ``log_dict`` with it, which calls ``log``. So are calls that reduce over several ranks.
    """
    own = {name for name in _LOGGING_METHODS if _is_own(module, name)}
    if "log" in own:
        own = set(_LOGGING_METHODS)
    recorders = _AMONG_RANKS if has_other_ranks() else _RECORDERS
    return {
        name: _at_once(module, name) if name in own else types.MethodType(recorder, module)
        for name, recorder in recorders.items()
    }


def _is_own(module: LightningModule, name: str) -> bool:
    return getattr(getattr(module, name), "__func__", None) is not getattr(lightning_base(module), name)


def _at_once(module: LightningModule, name: str) -> Callable[..., Any]:
    bound: Callable[..., Any] = getattr(module, name)
    eager: Callable[..., Any] = torch.compiler.disable(bound, reason=f"{name} is the user's own")  # type: ignore[no-untyped-call]
    return eager


class recorded_logs:  # read as a verb: with recorded_logs(module)
    """``self.log`` and ``self.log_dict`` are collected, and made in order at the end.

    The list is a new one each time: Dynamo guards on its length, so one that is not empty at the
    entry would mean a recompile on each step. Also after an exception, what was logged before it
    is logged. A class and no generator: it is entered in each step.
    """

    def __init__(self, module: LightningModule, methods: StandIns | None = None) -> None:
        self._module = module
        self._methods = stand_ins(module) if methods is None else methods
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._cover = cover(self._module, {_CALLS: self._calls, **self._methods})

    def __exit__(self, *_: object) -> None:
        uncover(self._module, self._cover)
        for name, args, kwargs in self._calls:
            getattr(self._module, name)(*map(_as_numbers, args), **kwargs)


class SwappedStep(SwappedRegion):
    """The whole ``training_step``, or another stage's step, as one region.

    ``self.log`` inside a compiled step would be an internal error of Dynamo, or a graph break. What the user
    puts in place of the step between :meth:`take_out` and :meth:`put` is compiled anew, and so is what the
    module's class has in its place by then, which ours would hide.
    """

    _ours: Callable[..., Any] | None = None

    def put(self, root: Any) -> None:
        """Give the module a step method of its own; ``take_out`` removes it."""
        (name,) = self.region.members
        give_back(root, name)
        self._ours = self._replacement(root, name)
        ours = cover(root, {name: self._ours})
        # wrapped since by somebody: theirs stays, and ours is eager from now on
        self.undo_later(functools.partial(uncover, root, ours))

    def _replacement(self, root: LightningModule, name: str) -> Callable[..., Any]:
        signed, methods = getattr(root, name), stand_ins(root)
        is_method = is_method_of(root, signed)
        original = signed.__func__ if is_method else ignoring_self(signed)
        is_own = name in vars(root)
        of_class = ClassMethods(type(root), (name, *_LOGGING_METHODS))

        def step_body(module: LightningModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return original(module, *args, **kwargs)

        compiled = self._compiled_once(source_of(root, name), step_body)

        def step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if not self._undo:
                give_back(module, name)
            hides = not is_own and not of_class.are_those_of(type(module))
            if hides and vars(module).get(name) is self._ours:  # else somebody has kept what he found
                return self._call_as_the_class_has_it(module, name, args, kwargs)
            if module is not root or self.is_off():
                return original(module, *args, **kwargs)  # a copy of the module runs as if never swapped
            if _CALLS in vars(module):
                return original(module, *args, **kwargs)  # the step calls itself: its calls are collected
            with recorded_logs(module, methods):
                if self._gate.lane is not Lane.COMPILE:
                    return self.call(compiled, step_body, (module, args, kwargs), {})
                with dynamic_integers([*integer_sources(signed, args, kwargs), *_TRAINER_COUNTERS]):
                    return self.call(compiled, step_body, (module, args, kwargs), {})

        ours = step if is_method else lambda *args, **kwargs: step(root, *args, **kwargs)
        ours = marked(looking_like(original if is_method else signed, ours), root, signed, self)
        return types.MethodType(ours, root) if is_method else ours

    def _call_as_the_class_has_it(
        self, root: LightningModule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The step of a module whose class is another one by now, or has another step."""
        step = method_of_class(root, name)
        if _CALLS in vars(root):
            return step(*args, **kwargs)
        if vars(root).get("_current_fx_name") == "training_step" == name and not kwargs:
            looked_at = getattr(root, name)  # for whether it takes the number of the batch
            given, taken = (is_param_in_hook_signature(s, "batch_idx", min_args=2) for s in (looked_at, step))
            if given != taken:
                args = (*args, root.trainer.fit_loop.batch_idx) if taken else args[:-1]
        if self.is_off():
            return step(*args, **kwargs)
        self.take_out()
        self.put(root)
        return getattr(root, name)(*args, **kwargs)

    def _compiled_once(self, source: Any, step_body: Callable[..., Any]) -> CompiledFunction:
        """The same step finds its compiled code when it is put in place again."""
        if self._compiled_call is None or source is not self._compiled_of:
            self._compiled_call, self._compiled_of = self.compiled(step_body), source
        return self._compiled_call
