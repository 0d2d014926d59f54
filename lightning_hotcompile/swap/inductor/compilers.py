"""The backends behind Dynamo: found by name, given their options, and kept from what breaks them."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch.compiler.config
from torch.fx import GraphModule

from lightning_hotcompile.config import CUDA_GRAPHS, uses_cuda_graphs
from lightning_hotcompile.swap.dynamo import TORCH, CompiledFn
from lightning_hotcompile.swap.inductor import (
    conv_layout,
    cpp_beside,
    cpp_wrapper,
    dropout_masks,
    layout_checks,
    loops,
    rounding,
    vector_masks,
)
from lightning_hotcompile.swap.inductor.permutations import plain_permutations
from lightning_hotcompile.swap.parity.captured import eager_forward


def backward_with_forward(*, outside: bool = False) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd compiles the backward at once, not at the first ``backward()``.

    Args:
        outside: whether the backward runs outside of the autocast around the forward, as Lightning's does.
            Else AOTAutograd takes it to run inside, and matrix products of what the step computes in 32 bit
            would have gradients of 16 bit.
    """
    settings: dict[str, Any] = {"backward_pass_autocast": "off"} if outside else {}
    patch: contextlib.AbstractContextManager[Any] = functorch_config.patch(
        force_non_lazy_backward_lowering=True, **settings
    )
    return patch


def _right_caches(graph_module: GraphModule) -> contextlib.AbstractContextManager[Any]:
    """None for a graph that takes a Python number as an input.

    Where an operation needs a plain number (``clamp``, ``masked_fill``) the compiler traces once more, with
    the number as a constant. From a cache comes code with that constant, and no guard on it. An environment
    that says ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=0`` has the last word, so its key is its own as well.
    """
    if not graph_module.graph.find_nodes(op="call_method", target="item"):
        return contextlib.nullcontext()
    config: Any = torch.compiler.config
    without: contextlib.AbstractContextManager[Any] = config.patch(
        force_disable_caches=True, cache_key_tag=f"{config.cache_key_tag}{uuid.uuid4().hex}"
    )
    return without


_SOURCES = vector_masks.SOURCE + dropout_masks.SOURCE
_WRITTEN = hashlib.sha256(_SOURCES.encode()).hexdigest()[:8] + "-11"
"""How code is written here; to be raised when :mod:`scatters`, :mod:`loop_errors`, :mod:`draws`,
:mod:`draw_order`, :mod:`kept_dependencies`, :mod:`local_buffers`, :mod:`reduction_tiles`,
:mod:`equal_elements`, :mod:`conv_gradients`, :mod:`pool_indices` or the rest of :mod:`dropout_masks` changes.
"""


def _own_keys() -> contextlib.AbstractContextManager[Any]:
    """What a cache is asked for is code as it is written here: the compiler's own keys do not tell."""
    config: Any = torch.compiler.config
    masks = "" if dropout_masks.why_not_drawn_here() is not None else "-masks"
    written = f"hotcompile-{_WRITTEN}{masks}{'' if TORCH >= (2, 13) else _autocast()}"
    keys: contextlib.AbstractContextManager[Any] = config.patch(
        cache_key_tag=f"{config.cache_key_tag}{written}"
    )
    return keys


def _autocast() -> str:
    """Under which autocast this is: before torch 2.13 keys tell whether there is one, not of what type."""
    devices = (device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
    return "".join(f"-{device}-{torch.get_autocast_dtype(device)}" for device in devices)


def backend_names() -> list[str]:
    """Every backend that Dynamo knows, those for debugging included."""
    names: list[str] = sorted(torch._dynamo.list_backends(exclude_tags=()))
    return names


def resolve_backend(
    backend: str | CompiledFn,
    mode: str | None,
    options: Mapping[str, Any] | None,
    random: str = "eager",
    *,
    checks_at_once: bool = False,
) -> CompiledFn:
    """A callable ``(graph_module, example_inputs)`` for a backend's name, mode and options.

    With ``random="eager"`` Inductor draws its random numbers as eager does, from the same generators in
    the same order. On a CPU its kernels are called from C++, see
    :mod:`~lightning_hotcompile.swap.inductor.cpp_wrapper`, and two threads share loops from another size
    on, see :mod:`~lightning_hotcompile.swap.inductor.loops`; convolutions with large weights stay in eager's
    memory layout, see :mod:`~lightning_hotcompile.swap.inductor.conv_layout`. Where a gradient asks what is
    equal to the largest element, 16 bits are rounded as in eager, see
    :mod:`~lightning_hotcompile.swap.inductor.rounding`.

    With ``checks_at_once``, for graphs that autograd does not run backwards (an optimizer's step), loops are
    shared as by default, and the code does not check the layout of each tensor: one call looks at all of
    them, see :mod:`~lightning_hotcompile.swap.inductor.layout_checks`. They have no CUDA graphs: gradients
    that a replayed backward has made are gone when the next graph is recorded. Other graphs have some only
    if mode or options ask for them, which are held against the Trainer; the process's own setting is not.

    ``options`` may say otherwise; other backends are left as they are.

    Raises:
        RuntimeError: Inductor does not know an option (its message lists those that it knows).
        torch._dynamo.exc.InvalidBackend: there is no backend of this name.
    """
    if backend == "inductor":
        ours: dict[str, Any] = {"fallback_random": True} if random == "eager" else {}
        ours[CUDA_GRAPHS] = uses_cuda_graphs(mode, options)
        last = {CUDA_GRAPHS: False} if checks_at_once else {}
        return _inductor(mode, ours, {**(options or {}), **last}, checks_at_once=checks_at_once)
    if backend == "eager":  # torch's own runs checkpoints in a way that is made for tracing
        return lambda graph_module, example_inputs: eager_forward(graph_module)
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value is not None}
    found = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    keeps = _keeps_unused_draws if backend == "aot_eager" and random == "eager" else contextlib.nullcontext

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        with keeps():
            compiled: CompiledFn = found(graph_module, list(example_inputs), **given)
        return compiled

    return compile_graph


def _keeps_unused_draws() -> contextlib.AbstractContextManager[Any]:
    """Random numbers in no use are drawn all the same, as in eager: this setting is not Inductor's alone."""
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import config

    kept: contextlib.AbstractContextManager[Any] = config.patch(fallback_random=True)
    return kept


def saved_draws(backend: str | CompiledFn, random: str, options: Mapping[str, Any] | None) -> frozenset[str]:
    """Names of operations that draw random numbers, and take little time in compiled code for a CPU."""
    in_cpp = backend == "inductor" and random == "eager" and cpp_wrapper.why_not_asked(options or {}) is None
    return frozenset({"bernoulli"} if in_cpp and dropout_masks.why_not_drawn_here() is None else ())


def _inductor(
    mode: str | None, ours: Mapping[str, Any], options: Mapping[str, Any], *, checks_at_once: bool
) -> CompiledFn:
    usual = _compiler(mode, ours, options, checks_at_once=checks_at_once)
    if cpp_wrapper.why_not_asked(options) is not None:
        return usual
    in_cpp = _compiler(mode, {**ours, **cpp_wrapper.OPTIONS}, options, checks_at_once=checks_at_once)
    return cpp_wrapper.or_else(cpp_beside.beside(in_cpp), usual)


def _compiler(
    mode: str | None, ours: Mapping[str, Any], options: Mapping[str, Any], *, checks_at_once: bool
) -> CompiledFn:
    def wrapper(more: Mapping[str, Any]) -> Any:
        # torch.compile's own wrapper checks the names of the options and knows what a mode means. Unlike
        # torch.compile itself it takes both; the options come last.
        make: Any = torch._TorchCompileInductorWrapper
        return make(mode, {**ours, **more, **options}, None)

    with contextlib.suppress(OSError):  # no cache folder can be made: a failure of the compile, not of ours
        wrapper({})

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        one_by_one = not checks_at_once or layout_checks.why_needed(graph_module, example_inputs) is not None
        held = layout_checks.held_by(graph_module)  # asked before: the compiler changes the graph
        more: dict[str, Any] = {} if one_by_one else {**layout_checks.WITHOUT}
        if not checks_at_once:
            more |= loops.options(graph_module, example_inputs, options)
            more |= conv_layout.options(graph_module, example_inputs, options)
            more |= rounding.options(graph_module, example_inputs, options)
        plain_permutations(graph_module)
        silent = rounding.without_a_toolkit() if rounding.NAME in more else contextlib.nullcontext()
        with _right_caches(graph_module), _own_keys(), silent:
            compiled: CompiledFn = wrapper(more)(graph_module, list(example_inputs))
        return compiled if one_by_one else layout_checks.checked(compiled, example_inputs, held)

    return compile_graph
