"""On a CPU Inductor's kernels are called from C++: one call from Python for a graph, not one for a kernel.

With the code that calls the kernels in C++, a step of small models (suite ``steady``) takes up to 2% less
time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_hotcompile.swap.dynamo import TORCH, CompiledFn, RestartCompile
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.parity.captured import copy_of, graphs_in, nodes_in
from lightning_hotcompile.swap.process.time_limit import is_over

_log = logging.getLogger(__name__)

NAME = "cpp_wrapper"
"""Of the option."""

OPTIONS: dict[str, Any] = {NAME: True}
"""Inductor's options for it."""

_SOURCE, _SOURCES = "_dynamo_source", "_param_name_to_source"
_VARIABLE = "TORCHINDUCTOR_CPP_WRAPPER"
_ON_ANOTHER_DEVICE = frozenset({"aten._efficientzerotensor.default"})
"""Called from C++ they return tensors on ``cpu:0``, which autograd does not take for ``cpu``."""

_CHECKS_LAYOUTS_SINCE = (2, 13)

NEED_PYTHON = "hotcompile_need_python"
"""Folder in the compiler's one: a file for each graph that C++ could not call."""


def why_not_asked(options: Mapping[str, Any]) -> str | None:
    """Why no graph is to be compiled so, or ``None``.

    Args:
        options: Inductor's, as the user gave them.
    """
    if NAME in options:
        return f"options have {NAME}"
    if _VARIABLE in os.environ:
        return f"{_VARIABLE} is set"
    if TORCH < _CHECKS_LAYOUTS_SINCE:
        return f"torch {torch.__version__} does not check sizes and strides there"
    return None


def why_not_possible(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Why this graph is not to be compiled so, or ``None``: something of it is not on the CPU."""
    values = [*example_inputs, *graph_module.parameters(), *graph_module.buffers()]
    values += [node.meta.get("example_value") for node in nodes_in(graph_module)]
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    elsewhere = next((t.device for t in tensors if t.device.type != "cpu"), None)
    return None if elsewhere is None else f"it has tensors on {elsewhere}"


def or_else(in_cpp: CompiledFn, usual: CompiledFn) -> CompiledFn:
    """A backend that compiles a graph by the first of two, and by the second where the first one fails.

    Which graphs hold an operation that C++ cannot call is written down beside the compiled code: where that
    is only loaded, the first way would take longer to fail than the second one to load it.

    Args:
        in_cpp: a backend whose code calls the kernels from C++.
        usual: the same one, whose code calls them from Python.
    """

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        if why_not_possible(graph_module, example_inputs) is not None:
            return usual(graph_module, example_inputs)  # type: ignore[no-any-return]
        mark = _mark_of(graph_module)
        if _needs_python(mark):
            return usual(graph_module, example_inputs)  # type: ignore[no-any-return]
        untouched = _with_origin(copy_of(graph_module), graph_module)
        refused: list[str] = []
        try:
            with _no_call_of_python(refused):
                return in_cpp(graph_module, example_inputs)  # type: ignore[no-any-return]
        except RestartCompile:
            raise
        except Exception:  # whatever it is, the other way may do
            if is_over():
                raise
            _log.debug("no C++ wrapper for a graph; its kernels are called from Python", exc_info=True)
        compiled: CompiledFn = usual(untouched, example_inputs)
        if refused:
            with contextlib.suppress(OSError):
                mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                mark.write_text("".join(f"{operation}\n" for operation in refused), encoding="utf-8")
        return compiled

    return compile_graph


def _mark_of(graph_module: GraphModule) -> Path:
    """The file that names the operations of this graph that C++ cannot call.

    Graphs that differ in shapes and dtypes only share one: a wrong one would cost speed and no more.
    """
    graphs = [str(each.graph) for each in graphs_in(graph_module)]
    digest = hashlib.sha256("\0".join([torch.__version__, *graphs]).encode()).hexdigest()
    return Path(inductor_paths.folder_in_use(), NEED_PYTHON, digest)


def _with_origin(copy: GraphModule, graph_module: GraphModule) -> GraphModule:
    """What Dynamo has noted beside the nodes of a graph, and guards are made of, goes over to its copy."""
    copy.meta.update(graph_module.meta)
    if hasattr(graph_module, _SOURCES):
        setattr(copy, _SOURCES, getattr(graph_module, _SOURCES))
    for ours, theirs in zip(copy.graph.nodes, graph_module.graph.nodes, strict=True):
        if hasattr(theirs, _SOURCE):
            setattr(ours, _SOURCE, getattr(theirs, _SOURCE))
    return copy


def _needs_python(mark: Path) -> bool:
    """Whether an operation that was noted there is still none that C++ can call."""
    try:
        operations = mark.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return False
    return any(not _is_known_in_cpp(operation) for operation in operations)


class _NeedsPython(Exception):
    """An operation that C++ could only call by way of Python, or not rightly."""


@contextlib.contextmanager
def _no_call_of_python(refused: list[str]) -> Iterator[None]:
    """Give up at the first operation that C++ has no function for, and name it in the list.

    Inductor would warn, and call it through Python, which gains nothing.
    """
    # Not at the top: a run without flip does not owe its import.
    from torch._inductor.ir import FallbackKernel

    prior, thread, active = FallbackKernel.__init__, threading.get_ident(), True

    @functools.wraps(prior)
    def init(kernel: Any, *args: Any, **kwargs: Any) -> None:
        prior(kernel, *args, **kwargs)
        ours = active and threading.get_ident() == thread  # another one may compile something of the user's
        if ours and not _is_known_in_cpp(kernel.op_overload):
            refused.append(str(kernel.op_overload))
            raise _NeedsPython(f"{kernel.op_overload} is not to be called from C++")

    try:
        with patch.object(FallbackKernel, "__init__", init):
            yield
    finally:
        active = False


def _is_known_in_cpp(operation: Any) -> bool:
    from torchgen.aoti.fallback_ops import inductor_fallback_ops

    return str(operation) in inductor_fallback_ops and str(operation) not in _ON_ANOTHER_DEVICE
