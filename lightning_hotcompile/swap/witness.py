"""The wrapper around the compiler backend: which graphs there are, and which of them ran."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from lightning_hotcompile.errors import ConfigError, near_names
from lightning_hotcompile.swap.dynamo import (
    CompiledFn,
    RestartCompile,
    backend_names,
    backward_with_forward,
    cache_hits,
    resolve_backend,
)

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Graph:
    """One captured graph: where it belongs, what it cost, how often it ran.

    ``seconds`` is the backend's own time, forward and backward. ``error`` is set if the backend
    failed: then the frame runs eagerly. ``cache_hit`` tells whether Inductor found
    it in its cache, ``None`` if that is not known.
    """

    region: str
    n_ops: int
    seconds: float = 0.0
    runs: int = 0
    error: str | None = None
    cache_hit: bool | None = None


class Witness:
    """Makes one backend for each region and remembers every graph that goes through it.

    A backend that raises is remembered in :attr:`Graph.error` and raises on: Dynamo then runs the frame as
    the user wrote it, and further graphs of the region are refused at once. The backward is compiled
    together with the forward, so that it fails (and counts) before anything has run.

    Args:
        backend: name of a Dynamo backend, or a callable ``(graph_module, example_inputs)``.
        mode: Inductor's mode.
        options: Inductor's options.
        now: a clock in seconds.
    """

    def __init__(
        self,
        backend: str | CompiledFn,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compile = resolve_backend(backend, mode, options)
        self._counts_cache_hits = backend == "inductor"
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

        def run(*args: Any) -> Any:
            graph.runs += 1
            self.total_runs += 1
            return compiled(*args)

        return run


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


def _count_ops(graph_module: GraphModule) -> int:
    return sum(n.op in ("call_function", "call_method", "call_module") for n in graph_module.graph.nodes)
