"""The wrapper around the compiler backend: which graphs there are, and which of them ran."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from lightning_hotcompile.errors import ConfigError, first_line, near_names
from lightning_hotcompile.swap.compiled_function import CodeNames, graph_of
from lightning_hotcompile.swap.dynamo import CompiledFn, LeavesFrame, RestartCompile, cache_hits
from lightning_hotcompile.swap.graphs.defined_memory import define_memory
from lightning_hotcompile.swap.graphs.functional_collectives import why_not_captured
from lightning_hotcompile.swap.graphs.graph import Graph, Watch
from lightning_hotcompile.swap.graphs.later_frames import LaterFrames
from lightning_hotcompile.swap.graphs.running import GraphAtWork
from lightning_hotcompile.swap.inductor.compilers import (
    backend_names,
    backward_with_forward,
    resolve_backend,
)
from lightning_hotcompile.swap.onlookers import captures_cuda_graph
from lightning_hotcompile.swap.parity.captured import copy_of, count_ops, eager_forward
from lightning_hotcompile.swap.parity.compare import NotNeutral
from lightning_hotcompile.swap.parity.neutral import neutralised
from lightning_hotcompile.swap.past_compiles import running_compile
from lightning_hotcompile.swap.process.said_in_vain import nothing_said_in_vain
from lightning_hotcompile.swap.process.saved_tensors import Hooks, hooks_in_use
from lightning_hotcompile.swap.process.thread_state import put_back_after_errors
from lightning_hotcompile.swap.process.time_limit import time_limit
from lightning_hotcompile.swap.repeats import is_checkpointed
from lightning_hotcompile.swap.tracing.float_inputs import constants_of_one_frame
from lightning_hotcompile.swap.tracing.moving_numbers import MovingNumbers
from lightning_hotcompile.swap.tracing.set_and_read import SetAndRead

_log = logging.getLogger(__name__)

_CAPTURED = "a CUDA graph is being captured"
_OPENED = "a hook of a module opens an activation checkpoint, which repeats it eagerly"


class Witness:
    """Makes one backend for each region and remembers every graph that goes through it.

    A backend that raises is remembered in :attr:`Graph.error` and raises on: Dynamo then runs the frame as
    the user wrote it, and further graphs of the region are refused at once. The backward is compiled
    together with the forward, so that it fails (and counts) before anything has run.

    Args:
        backend: name of a Dynamo backend, or a callable ``(graph_module, example_inputs)``.
        mode: Inductor's mode.
        options: Inductor's options.
        parity: what to do about a graph whose first run differs from eager, or that makes NaN later where
            eager does not: ``auto`` runs it eagerly and sets its error, ``warn`` only warns, ``raise``
            raises, ``off`` does not look.
        random: ``eager`` has Inductor draw the random numbers of a run without the callback, ``backend``
            leaves them to it.
        compile_timeout: seconds that the backend may take for one graph, ``None`` for no limit; in the main
            thread of a POSIX system only.
        backward_outside: whether the backward runs outside of the autocast around the forward.
        raise_errors: raise what compiled code raises, in place of answering with eager.
        on_failure: told of the error when a graph fails after it had been compiled.
        names: of the code that is compiled; shared by what may share what Dynamo remembers of it.
        now: a clock in seconds.
    """

    def __init__(
        self,
        backend: str | CompiledFn,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        parity: str = "auto",
        random: str = "eager",
        compile_timeout: float | None = None,
        backward_outside: bool = False,
        raise_errors: bool = False,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        names: CodeNames | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.names = names or CodeNames()
        # At the first graph: Inductor's import takes a third of a second, too much for a run without flip.
        self._resolve = functools.cache(functools.partial(resolve_backend, backend, mode, options, random))
        self._counts_cache_hits = backend == "inductor"
        self._timeout = compile_timeout
        self.watch = Watch(
            parity=parity,
            draws_as_eager=_draws_as_eager(backend, options, random),
            backward_outside=backward_outside,
            raise_errors=raise_errors,
            on_failure=on_failure,
        )
        self._now = now
        self.graphs: list[Graph] = []
        self.numbers = MovingNumbers()
        self.set_and_read = SetAndRead()
        self._later_frames = LaterFrames(self.names.is_one)
        self._hooks_of_call: tuple[Hooks | None] | None = None
        """On saved tensors, where the call of a region began that is compiled now; ``None`` if unknown."""

        self.collect: Callable[[str, GraphModule, Sequence[Any]], None] | None = None
        """Where graphs go in place of being compiled; they then run as they were captured."""

    def begin_call(self) -> None:
        """A region is called, and may be compiled in the course of it."""
        self._hooks_of_call = (hooks_in_use(),)

    def backend_for(self, region: str, *, checks_at_once: bool = False) -> CompiledFn:
        """A backend for ``torch.compile`` whose graphs belong to ``region``.

        Args:
            region: its name.
            checks_at_once: whether the layout of tensors is looked at in one call, see
                :func:`~lightning_hotcompile.swap.inductor.compilers.resolve_backend`.
        """
        compile_graph = functools.partial(self._compile_in_time, checks_at_once=checks_at_once)

        def witnessed(graph_module: GraphModule, example_inputs: Sequence[Any], **_: Any) -> CompiledFn:
            try:
                return self._witness(region, graph_module, example_inputs, compile_graph)
            except RestartCompile:
                raise
            except Exception as error:
                self._later_frames.keep_those_before(region, witnessed, error)
                raise

        return witnessed

    def graphs_of(self, region: str) -> list[Graph]:
        """The graphs of one region, oldest first."""
        return [g for g in self.graphs if g.region == region]

    def runs_of(self, region: str) -> int:
        """How often compiled code of one region ran."""
        return sum(g.runs for g in self.graphs if g.region == region and g.error is None)

    def error_of(self, region: str) -> str | None:
        """The first error of the backend in one region."""
        return next((g.error for g in self.graphs if g.region == region and g.error), None)

    def _witness(
        self,
        region: str,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        compile_graph: CompiledFn,
    ) -> CompiledFn:
        self.set_and_read.look(region)
        self._refuse_unusable(region, graph_module)
        define_memory(graph_module)
        if self.collect is not None:
            with backward_with_forward(outside=self.watch.backward_outside):
                self.collect(region, graph_module, example_inputs)
            return self._as_captured(graph_module)
        graph = Graph(region=region, n_ops=count_ops(graph_module), compile_id=running_compile())
        captured = copy_of(graph_module, _let_examples_go)
        start, hits = self._now(), cache_hits()
        try:
            compiled = compile_graph(graph_module, example_inputs)
        except RestartCompile:
            raise  # not an error: Dynamo traces the frame once more, with what it has learned
        except Exception as error:
            _log.debug("backend failed on a graph of region %s", region, exc_info=True)
            graph.error = first_line(error)
            self.graphs.append(graph)
            raise
        graph.seconds = self._now() - start
        graph.cache_hit = cache_hits() > hits if self._counts_cache_hits else None
        self.graphs.append(graph)

        def neutral(inputs: Sequence[Any]) -> tuple[CompiledFn, CompiledFn]:
            return _neutral(captured, inputs, compile_graph)

        run = GraphAtWork(graph, captured, compiled, self.watch, neutral).entry()
        self._later_frames.compiled(region, graph_of(run))
        return run

    def _as_captured(self, graph_module: GraphModule) -> CompiledFn:
        forward, watch = eager_forward(graph_module), self.watch

        def run(*args: Any) -> Any:
            watch.collected_runs += 1
            return forward(*args)

        return run

    def _refuse_unusable(self, region: str, graph_module: GraphModule) -> None:
        """Have Dynamo run the frame as the user wrote it, where a graph must not run at all."""
        if (earlier := self.error_of(region)) is not None:
            raise RuntimeError(f"another graph of this region failed: {earlier}")
        if captures_cuda_graph():
            raise LeavesFrame(_CAPTURED)
        if (moves := self.numbers.why_not_this(region, graph_module)) is not None:
            raise LeavesFrame(moves)
        reason = self.numbers.why_not_again(region) or why_not_captured(graph_module)
        if reason is None and is_checkpointed(hooks := hooks_in_use()):
            is_as_called = self._hooks_of_call in (None, (hooks,))
            reason = self.set_and_read.why_not_repeated(region) if is_as_called else _OPENED
        reason = reason or self._later_frames.why_not_another(region)
        if reason is not None:
            self.graphs.append(Graph(region=region, n_ops=count_ops(graph_module), error=reason))
            raise RuntimeError(reason)

    def _compile_in_time(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], *, checks_at_once: bool
    ) -> CompiledFn:
        limit = time_limit(self._timeout, "compile_timeout")
        backward = backward_with_forward(outside=self.watch.backward_outside)
        with put_back_after_errors(), limit, backward, constants_of_one_frame(), nothing_said_in_vain():
            compiled: CompiledFn = self._resolve(checks_at_once=checks_at_once)(graph_module, example_inputs)
            return compiled


def _draws_as_eager(backend: object, options: Mapping[str, Any] | None, random: str) -> bool:
    """Whether a backend is known to draw eager's random numbers."""
    of_inductor = random == "eager" and bool((options or {}).get("fallback_random", True))
    return backend == "aot_eager" or (backend == "inductor" and of_inductor)


def _let_examples_go(node: Node) -> None:
    """Dynamo drops them from its own graph; a copy would keep arrays of the first batch with the code."""
    node.meta.pop("grapharg", None)


def _neutral(
    captured: GraphModule, inputs: Sequence[Any], compile_graph: CompiledFn
) -> tuple[CompiledFn, CompiledFn]:
    """The graph without its random numbers, eager and compiled."""
    try:
        eager = neutralised(captured)
        compiled = compile_graph(neutralised(captured), inputs)
    except Exception as error:
        _log.debug("a graph without its random numbers was not compiled", exc_info=True)
        raise NotNeutral(f"without its random numbers it was not compiled: {first_line(error)}") from error
    return eager_forward(eager), compiled


def check_backend(backend: str | CompiledFn, mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Refuse an unknown backend or option before training begins.

    Raises:
        ConfigError: there is no such backend, or Inductor does not know an option.
    """
    if backend == "inductor" and not options:
        return  # listing the names would import every backend
    if isinstance(backend, str) and backend not in (known := backend_names()):
        raise ConfigError(
            f"backend={backend!r} is not known{near_names(backend, known)}. Known: {', '.join(known)}."
        )
    try:
        resolve_backend(backend, mode, options)
    except RuntimeError as error:
        unknown = str(error).partition(", known options")[0]
        raise ConfigError(
            f"options={dict(options or {})!r} are refused by the backend: {unknown}."
        ) from error
