"""The wrapper around the compiler backend: which graphs there are, and which of them ran."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from lightning_hotcompile.errors import ConfigError, HotCompileWarning, ParityError, near_names
from lightning_hotcompile.swap.dynamo import (
    CompiledFn,
    RestartCompile,
    backend_names,
    backward_with_forward,
    cache_hits,
    resolve_backend,
)
from lightning_hotcompile.swap.parity import Parity, compare

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Graph:
    """One captured graph: where it belongs, what it cost, how often it ran.

    ``seconds`` is the backend's own time, forward and backward. ``error`` is set if the backend
    failed: then the frame runs eagerly. ``cache_hit`` tells whether Inductor found
    it in its cache, ``None`` if that is not known. ``parity`` is set by the first run.
    """

    region: str
    n_ops: int
    seconds: float = 0.0
    runs: int = 0
    error: str | None = None
    cache_hit: bool | None = None
    parity: Parity | None = None


class Witness:
    """Makes one backend for each region and remembers every graph that goes through it.

    A backend that raises is remembered in :attr:`Graph.error` and raises on: Dynamo then runs the frame as
    the user wrote it, and further graphs of the region are refused at once. The backward is compiled
    together with the forward, so that it fails (and counts) before anything has run.

    Args:
        backend: name of a Dynamo backend, or a callable ``(graph_module, example_inputs)``.
        mode: Inductor's mode.
        options: Inductor's options.
        parity: what to do about a graph whose first run differs from eager: ``auto`` runs it eagerly and
            sets its error, ``warn`` only warns, ``raise`` raises, ``off`` does not compare.
        now: a clock in seconds.
    """

    def __init__(
        self,
        backend: str | CompiledFn,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        parity: str = "auto",
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compile = resolve_backend(backend, mode, options)
        self._counts_cache_hits = backend == "inductor"
        self._parity = parity
        self._now = now
        self.graphs: list[Graph] = []
        self.total_runs = 0

    def backend_for(self, region: str) -> CompiledFn:
        """A backend for ``torch.compile`` whose graphs belong to ``region``."""

        def witnessed(graph_module: GraphModule, example_inputs: Sequence[Any], **_: Any) -> CompiledFn:
            return self._witness(region, graph_module, example_inputs)

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

    def _witness(self, region: str, graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        graph = Graph(region=region, n_ops=_count_ops(graph_module))
        if (earlier := self.error_of(region)) is not None:
            raise RuntimeError(f"another graph of this region failed: {earlier}")
        start, hits = self._now(), cache_hits()
        try:
            with backward_with_forward():
                compiled = self._compile(graph_module, example_inputs)
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

        if self._parity == "off":
            graph.parity = Parity(agrees=None, reason="parity='off'")
        in_use = compiled

        def run(*args: Any) -> Any:
            nonlocal in_use
            graph.runs += 1
            self.total_runs += 1
            if graph.parity is None:
                in_use = self._checked(graph, graph_module, compiled, args)
            return in_use(*args)

        return run

    def _checked(
        self, graph: Graph, graph_module: GraphModule, compiled: CompiledFn, args: Sequence[Any]
    ) -> CompiledFn:
        """What is to run from now on: the compiled code, or the captured graph itself if they differ."""
        # forward and not a call: a call prints a traceback if the 64-bit run is not possible
        graph.parity = parity = compare(graph_module.forward, compiled, args, tensors_of(graph_module))
        if not parity.failed:
            return compiled
        message = f"compiled code of {graph.region} is not right: {parity.reason}"
        if self._parity == "raise":
            raise ParityError(f"{message}. Set parity='auto' to train on eagerly.")
        if self._parity == "warn":
            warnings.warn(
                f"{message}. It is used all the same: parity='warn'.", HotCompileWarning, stacklevel=2
            )
            return compiled
        graph.error = f"not right: {parity.reason}"
        eager: CompiledFn = graph_module.forward
        return eager


def first_line(error: BaseException) -> str:
    """An error as one line: its kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_backend(backend: str | CompiledFn, mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Refuse an unknown backend or option before training begins.

    Raises:
        ConfigError: there is no such backend, or Inductor does not know an option.
    """
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


def tensors_of(graph_module: GraphModule) -> list[Tensor]:
    """Tensors that the graph holds by itself: Dynamo puts an optimizer's parameters and state there."""
    held = [*graph_module.parameters(), *graph_module.buffers()]
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = functools.reduce(getattr, str(node.target).split("."), graph_module)
        if isinstance(value, Tensor):
            held.append(value)
    return list({id(t): t for t in held}.values())


def _count_ops(graph_module: GraphModule) -> int:
    return sum(n.op in ("call_function", "call_method", "call_module") for n in graph_module.graph.nodes)
