"""A function behind ``torch.compile``, and the way to call it in a step that may not stall."""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo.eval_frame as eval_frame
from torch._dynamo.eval_frame import RunOnlyContext

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.letting_go import note_life
from lightning_hotcompile.swap.tracing import overrides

_ISOLATION = "_isolate_recompiles_id"
_HAS_ISOLATION = "isolate_recompiles" in inspect.signature(torch.compile).parameters and hasattr(
    RunOnlyContext(), _ISOLATION
)
_HAS_BUCKETS = _HAS_ISOLATION and hasattr(eval_frame, "_get_cache_entries_for_region")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class CodeNames:
    """Names for the code of one stage of a training, by which Dynamo remembers what varies in it.

    It remembers by file, line and name, for as long as the process lives: what one stage, or one region, has
    shown must not have the next one, with other sizes, compiled for any size. Plans of one stage share what
    was learned. After a graph break what the user's code calls is compiled by the user's file, line and name.
    """

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._number = next(self._numbers)

    def of(self, function: str, region: str) -> str:
        """The name of a function that is compiled for a region."""
        return f"{function}{self._end(region)}"

    def is_one(self, name: str, region: str) -> bool:
        """Whether a function that is compiled for a region has this name."""
        return name.endswith(self._end(region))

    def _end(self, region: str) -> str:
        return f"_{self._number}_{re.sub(r'[^0-9A-Za-z]+', '_', region)}"


class CompiledFunction:
    """``torch.compile`` with a recompile limit of its own, and a way to call it that compiles nothing.

    The limits count per code object: many regions behind one function would silently run eagerly after
    the eighth, and all regions of all trainings in a process after the 256th. So each has a code object of
    its own, which also lets go of what was compiled for it, and is isolated where torch can do that. Torch
    notes for all threads at once which function is being called: trainings in threads of their own, as of a
    study with several jobs, would not find again what was compiled for them. They are not isolated.

    Args:
        function: what is compiled.
        backend: a Dynamo backend.
        dynamic: Dynamo's ``dynamic`` argument.
        fullgraph: refuse graph breaks.
        name: of its code, see :class:`CodeNames`; ``None`` for the function's.

    Attributes:
        compile: calls the function; what no compiled code fits is compiled.
        reuse: calls the function; what no compiled code fits runs eagerly.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: CompiledFn,
        *,
        dynamic: bool | None,
        fullgraph: bool,
        name: str | None = None,
    ) -> None:
        overrides.mark(backend)
        arguments: dict[str, Any] = {"backend": backend, "dynamic": dynamic, "fullgraph": fullgraph}
        isolated = _HAS_ISOLATION and threading.current_thread() is threading.main_thread()
        if isolated:
            arguments["isolate_recompiles"] = True
        function = _with_own_code(function, name)
        self.compile: CompiledFn = torch.compile(function, **arguments)
        self.reuse: CompiledFn = _reusing(function, self.compile)
        note_life(function, getattr(self.compile, _ISOLATION) if _HAS_BUCKETS and isolated else None)
        self._function = function
        self._by_graph: dict[object, CompiledFn] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``torch.compile`` gives."""
        return self.compile(*args, **kwargs)

    def that_runs(self, graph: object) -> CompiledFn:
        """The function by the code that runs this graph, whatever else would fit a call by now.

        Several codes may fit one call, and the one that fitted last is asked first: that for any value of a
        number, which came after that for the first one. And where no guard fits the limit on recompiles may
        be reached. The graph of a frame that comes after a graph break is :attr:`reuse`'s to find.

        Args:
            graph: what :func:`mark_graph` was given.
        """
        if graph not in self._by_graph:
            codes = [entry.code for entry in _entries(self._function.__code__, self.compile)]
            found = next((code for code in codes if graph in _graphs_of(code, self._function)), None)
            self._by_graph[graph] = (
                self.reuse if found is None else _reusing(_with_code(self._function, found), self.compile)
            )
        return self._by_graph[graph]


_GRAPH = "_hotcompile_graph"


def mark_graph(run: CompiledFn, graph: object) -> CompiledFn:
    """What a backend gives to Dynamo: it calls it, by a name of its own, where the graph is to run."""
    setattr(run, _GRAPH, graph)
    return run


def graph_of(run: CompiledFn) -> Any:
    """What :func:`mark_graph` was given."""
    return getattr(run, _GRAPH)


def _graphs_of(code: types.CodeType, function: Any) -> list[object]:
    calls = (function.__globals__.get(name) for name in code.co_names)
    return [vars(call)[_GRAPH] for call in calls if _GRAPH in getattr(call, "__dict__", ())]


def _entries(code: types.CodeType, compiled: CompiledFn) -> list[Any]:
    """What Dynamo has compiled for this code."""
    if _HAS_BUCKETS:
        return list(eval_frame._get_cache_entries_for_region(code, getattr(compiled, _ISOLATION)))
    return list(eval_frame._debug_get_cache_entry_list(code))


def _reusing(function: Callable[..., Any], compiled: CompiledFn) -> CompiledFn:
    """The same function in Dynamo's run-only mode, with the graphs of ``compiled``.

    ``torch.compiler.set_stance("eager_on_recompile")`` would do the same to all functions, also to those that
    are to run without Dynamo: within ``torch.compiler.disable``, which the compiled code itself is called
    through, each Python frame would go by way of Dynamo, 6 to 9% slower.
    """
    context = RunOnlyContext()
    if _HAS_ISOLATION:
        setattr(context, _ISOLATION, getattr(compiled, _ISOLATION))
    reuse: CompiledFn = context(function)
    return reuse


def untraced(hook: _Hook) -> _Hook:
    """A hook of ours on a backward: Dynamo is on where a step asks for gradients itself, at a graph break.

    It would compile the hook as a part of the step, and count changes of tensors as they were traced.
    """
    left_alone: _Hook = torch.compiler.disable(hook, reason="no part of the step")  # type: ignore[no-untyped-call]
    return left_alone


def without_disable(function: CompiledFn) -> CompiledFn:
    """What ``torch.compiler.disable`` wraps, for where Dynamo is off already: it calls all graphs so.

    A wrapper that somebody has put around it stays: ``functools.wraps`` copies the marks, but not the id.
    """
    marked = getattr(function, "_torchdynamo_disable", False)
    if not marked or getattr(function, "_torchdynamo_wrapper_id", None) != id(function):
        return function
    wrapped: CompiledFn = getattr(function, "_torchdynamo_orig_callable", function)
    return wrapped


def _with_own_code(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType):
        # One of torch's own: Dynamo would call all of them by one frame.
        return _with_own_code(lambda *args, **kwargs: function(*args, **kwargs), name)
    return _with_code(function, function.__code__.replace(co_name=name or function.__code__.co_name))


def _with_code(function: Callable[..., Any], code: types.CodeType) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    vars(copy).update(vars(function))
    return copy
