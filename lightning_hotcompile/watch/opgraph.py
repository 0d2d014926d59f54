"""One step's aten operations as a canonical dependency graph: what really ran, whatever it is called.

Two recordings have the same digest when the same operations ran in the same order, on tensors with the same
history, shapes, strides, dtypes and device types, and with the same other arguments. Names of tensors, their
place in memory and the process make no difference.

Floats are the exception. An operation that runs without gradients and outside the backward (an optimizer's
update, an average of weights, gradient clipping) counts them by type only: step sizes, bias corrections and
scheduled learning rates change all the time, and with them no two steps of Adam would be equal. In
the forward and the backward a float is part of the computation and counts by value.

Several accelerators in one process run their backwards in threads of their own: the order of operations, and
with it the digest, can then differ from step to step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import Parameter

from lightning_hotcompile.watch.below_autocast import call_under_autocast, calls_others
from lightning_hotcompile.watch.canonical import MAKES, Canonical, OpGraph
from lightning_hotcompile.watch.lowest_mode import LowestMode
from lightning_hotcompile.watch.tensor_identity import Place, SeenStorages, storage_number

_AS_THEY_ARE = frozenset({bool, type(None), torch.dtype, torch.layout, torch.memory_format})

_is_grad_enabled = torch.is_grad_enabled
_autograd_node = torch._C._current_autograd_node
_AccumulateGrad = vars(torch._C._functions)["AccumulateGrad"]


_NEVER_CAPTURED = {getattr(kind.forward, "__code__", None) for kind in (nn.RNN, nn.LSTM, nn.GRU)}
"""Dynamo breaks the graph there: on a CPU a GRU is dozens of small operations that no compiled code has."""


_ENGINE = {getattr(torch.autograd.graph._engine_run_backward, "__code__", None)}
"""What starts a backward: of the engine's own operations it is the caller."""

_OWN_FRAMES, _WRAPPERS = 2, 2
"""Frames between the look at the stack and the caller of an operation: ``__torch_dispatch__`` is so far up,
and has at most so many of torch's around it."""

_DISPATCHES, _PASSES_ON = "__torch_dispatch__", getattr(OpOverload.__call__, "__code__", None)
"""A mode above ours is another such frame, and calls the operation by torch's."""


def _in_backward() -> bool:
    """Whether autograd runs a node now: not its gradient accumulators, in whose hooks optimizers may run."""
    node = _autograd_node()
    return node is not None and node.__class__ is not _AccumulateGrad


def _is_called_by(codes: Collection[CodeType | None]) -> bool:
    """Whether one of these functions has called the operation that is dispatched now."""
    frame: FrameType | None = sys._getframe(_OWN_FRAMES).f_back
    left = _WRAPPERS + 1
    while left:
        if frame is None:  # in a thread of the engine's own, for what is on an accelerator
            return codes is _ENGINE
        code = frame.f_code
        if code in codes:
            return True
        if code is not _PASSES_ON:
            left = _WRAPPERS + 1 if code.co_name == _DISPATCHES else left - 1
        frame = frame.f_back
    return False


def _describe(value: Any) -> str:
    """Strings and devices as they are; generators, graphs of higher-order operators and the rest by type.

    Those may hold tensors, and their ``repr`` an address.
    """
    if isinstance(value, str):
        return repr(value)
    return str(value.type) if isinstance(value, torch.device) else type(value).__name__


class OpRecorder(LowestMode):
    """Records every aten operation between ``start`` and ``stop``, or inside ``with``: the backward's too.

    It holds no tensor, so that memory is freed when it would be without it. An error inside the recording
    only makes ``graph`` give ``None``; each operation runs exactly once in any case. Costs several
    microseconds an operation: meant for a few sampled steps, not for each.

    Example:
        >>> with OpRecorder() as recorder:
        ...     _ = torch.relu(torch.ones(2, 3)).sum()
        >>> recorder.graph().sequence_text()
        'ones -> relu -> sum'
    """

    # Otherwise torch refuses higher-order operators (flex_attention and such) while we record.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._active = False
        self._begin()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code that the user compiled stay compiled while we record."""
        return True

    def _begin(self) -> None:
        self._seen = SeenStorages()
        self._trace: list[list[Any]] = []
        self._took: list[tuple[Any, float]] = []
        self._forward: list[tuple[Any, bool]] = []
        self._broken = False
        self.differentiates_twice = False
        """Whether the backward was run with a graph of its own (``create_graph=True``)."""
        self._graph: OpGraph | None = None

    def start(self) -> None:
        """Begin a new recording; what was recorded before is forgotten. Nothing happens while one runs."""
        if self._active:
            return
        self._begin()
        self.put()
        self._active = True

    def stop(self) -> None:
        """End the recording; without one, nothing happens."""
        if not self._active:
            return
        self._active = False
        self._seen.release()
        self.take_off()

    def __enter__(self) -> OpRecorder:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def graph(self) -> OpGraph | None:
        """What was recorded last; ``None`` if nothing was, or if the recording broke."""
        if self._graph is None and self._trace and not (self._broken or self._active):
            self._graph = Canonical().graph(self._trace)
            self._trace = []
        return self._graph

    @property
    def seconds_by_op(self) -> Mapping[str, float]:
        """Seconds that the operations of each name took in the last recording, without recording them.

        On an accelerator these are the times of the launches.
        """
        by_id: dict[int, float] = {}  # their hashes and names are slow
        for func, seconds in self._took:
            by_id[id(func)] = by_id.get(id(func), 0.0) + seconds
        funcs = {id(func): func for func, _ in self._took}
        return {str(funcs[key]): seconds for key, seconds in by_id.items()}

    @property
    def forward_ops(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """How often each operation ran outside of the backward, and how often where Dynamo captures none."""
        inside = Counter(func for func, is_inside in self._forward if is_inside)
        everywhere = Counter(func for func, _ in self._forward)
        return {str(f): n for f, n in everywhere.items()}, {str(f): n for f, n in inside.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tokens = None
        if not self._broken:
            try:
                tokens = self._inputs(func, args, kwargs)
            except Exception:  # noqa: BLE001  (a fault of the recording must not break the user's step)
                self._broken = True
        call = func._op if func.__class__ is OpOverload else func
        if calls_others(func):
            call = partial(call_under_autocast, call)
        start = perf_counter()
        out = call(*args, **kwargs) if kwargs else call(*args)
        if tokens is not None:
            self._took.append((func, perf_counter() - start))
            try:
                self._outputs(tokens, args, out)
            except Exception:  # noqa: BLE001
                self._broken = True
        return out

    # The next two run a thousand times a step: what can wait until graph() waits, and the usual cases stand
    # in line although SeenStorages.read and made, which take every kind of tensor, would do.

    def _inputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
        tokens = [func]
        self._read(args, tokens)
        if kwargs:
            tokens.extend(kwargs)
            self._read(kwargs.values(), tokens)
        # In a backward the grad mode is off but for create_graph, and where checkpointing repeats a forward:
        # Python calls the operations there, and autograd's engine those of a backward, whatever their names.
        if _in_backward() and _is_grad_enabled() and ("backward" in func.__name__ or _is_called_by(_ENGINE)):
            self.differentiates_twice = True
        elif _autograd_node() is None:
            self._forward.append((func, _is_called_by(_NEVER_CAPTURED)))
        # Before the call: should the operation raise, what its inputs introduced is still in the trace.
        self._trace.append(tokens)
        return tokens

    def _read(self, values: Iterable[Any], tokens: list[Any]) -> None:
        add, has_views = tokens.append, self._seen.has_views.get
        for value in values:
            kind = value.__class__
            if kind is Tensor or kind is Parameter:
                try:
                    number = storage_number(value)
                    views = has_views(number)
                    if views is False:
                        add(number)
                    elif views:
                        add((number, value.storage_offset(), value.shape, value.stride()))
                    else:
                        add(self._seen.read(value))
                except RuntimeError:
                    add(self._seen.read(value))
            elif kind is int:
                add(str(value))  # a bare number would be taken for a storage
            elif kind in _AS_THEY_ARE:
                add(value)
            elif kind is float or kind is complex:
                add(value if _is_grad_enabled() or _in_backward() else kind.__name__)
            elif isinstance(value, Tensor):
                add(self._seen.read(value))
            elif isinstance(value, (list, tuple)):
                add("[")
                self._read(value, tokens)
                add("]")
            else:
                add(_describe(value))

    def _outputs(self, tokens: list[Any], args: tuple[Any, ...], out: Any) -> None:
        tokens.append(MAKES)
        if args and out is args[0]:
            # The same variable with another value: the order of operations tells which one is read.
            tokens.append("in place")
        elif out.__class__ is Tensor:
            tokens.append(self._made(out))
        elif isinstance(out, Tensor):
            tokens.append(self._seen.made(out))
        elif isinstance(out, (list, tuple)):
            for item in out:
                self._outputs(tokens, (), item)
        else:
            # A number that was read from a tensor is data, not structure.
            tokens.append(out.__class__.__name__)

    def _made(self, tensor: Tensor) -> Place:
        seen = self._seen
        try:
            place = (storage_number(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        except RuntimeError:
            return seen.made(tensor)
        if place[0] in seen.has_views:
            seen.has_views[place[0]] = True
            return place
        seen.keep(place[0], tensor)
        return (*place, tensor.dtype)
