"""A captured graph as bytes, so that another process can compile the very same one.

AOTAutograd's and Inductor's cache keys hold the graph's code, what Dynamo knows about its inputs, the
compiler's configuration and the state of the thread. All of that is in the bytes, and no data of any tensor.
The format is for a process and its own child: unpacking runs what the bytes say.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_hotcompile.swap.inductor.compilers import backward_with_forward, resolve_backend
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.rehearsal import rehearse
from lightning_hotcompile.swap.prewarm.symbols import NotPortable, SizeSpec, Symbols, symbols_of
from lightning_hotcompile.swap.prewarm.tensor_spec import TensorSpec, refuse_shared_memory
from lightning_hotcompile.swap.process.free_memory import give_back_unused

_STATIC = "_dynamo_static_input_type"  # in a placeholder's metadata: memory that does not move


def pack(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    random: str = "eager",
) -> bytes:
    """A graph with everything that its compile by Inductor depends on; call it as Dynamo's backend.

    Raises:
        NotPortable: the graph has something that cannot be described or is not known elsewhere.
    """
    placeholders = list(graph_module.graph.find_nodes(op="placeholder"))
    inputs = [_spec(n.name, v) for n, v in zip(placeholders, example_inputs, strict=True)]
    tensors = [v for v in example_inputs if isinstance(v, Tensor)]
    refuse_shared_memory([*tensors, *graph_module.parameters(), *graph_module.buffers()])
    try:
        return pickle.dumps(
            {
                "state": CompileState.now(),
                "mode": mode,
                "random": random,
                "options": dict(options) if options else None,
                "inputs": inputs,
                "symbols": [symbols_of(n) for n in placeholders],
                "sources": [getattr(n, "_dynamo_source", None) for n in placeholders],
                "static": [n.meta.get("tensor_dict", {}).get(_STATIC) for n in placeholders],
                "fields": {name: list(vars(m)) for name, m in _graph_modules(graph_module)},
                "lazy": [n for n, m in _graph_modules(graph_module) if isinstance(m, _LazyGraphModule)],
                "graph": GraphPickler.dumps(
                    _without_tensors(graph_module), Options(node_metadata_key_filter=_plain_metadata)
                ),
            }
        )
    except NotPortable:
        raise
    except Exception as error:  # pickling runs code of whatever the graph holds
        raise NotPortable(f"the graph cannot be serialised: {type(error).__name__}: {error}") from error


def graphs_in_cache() -> int:
    """Graphs that this process has put into AOTAutograd's cache or has found there."""
    return int(counters["aot_autograd"]["autograd_cache_saved"]) + graphs_found()


def graphs_found() -> int:
    """Graphs that this process has found in AOTAutograd's cache."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


def compile_packed(data: bytes) -> None:
    """Compile a packed graph, forward and backward, so that Inductor's caches have it, and run it once."""
    packed = pickle.loads(data)
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    graph_module = GraphPickler.loads(packed["graph"], fake)
    assert isinstance(graph_module, GraphModule)
    for name, module in _graph_modules(graph_module):
        has = vars(module)  # the order of the fields is part of the key
        module.__dict__ = {field: has[field] for field in packed["fields"][name] if field in has}
        if name in packed["lazy"]:  # its code is written when it is asked for, which decides their order, too
            type(module).__bases__ = (_LazyGraphModule,)
    with packed["state"].applied(), tracing(TracingContext(fake)):
        alive = _with_tensors(graph_module, fake)
        symbols = Symbols(fake.shape_env, packed["inputs"], packed["sources"])
        inputs = _inputs(packed, fake, symbols)
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        for node, source, static in zip(placeholders, packed["sources"], packed["static"], strict=True):
            node._dynamo_source = source
            node.meta["tensor_dict"] = {_STATIC: static} if static else {}
        _propagate(graph_module, [seen for _, seen in _inputs(packed, fake, symbols)], fake)
        give_back_unused()
        with backward_with_forward():
            compiler = resolve_backend("inductor", packed["mode"], packed["options"], packed["random"])
            compiled = compiler(graph_module, [real for real, _ in inputs])
        del alive
        rehearse(compiled, [real for real, _ in inputs], graph_module)


def _spec(name: str, value: Any) -> TensorSpec | SizeSpec:
    if isinstance(value, torch.SymInt):
        return SizeSpec.of(name, value)
    return TensorSpec.of(name, value)


def _inputs(packed: Mapping[str, Any], mode: FakeTensorMode, symbols: Symbols) -> list[tuple[Any, Any]]:
    """Each input of a packed graph: what the compiler is given, and what ``mode`` takes it for."""
    inputs: list[tuple[Any, Any]] = []
    for spec, source, names in zip(packed["inputs"], packed["sources"], packed["symbols"], strict=True):
        if isinstance(spec, SizeSpec):
            size = symbols.size(spec, source)
            inputs.append((size, size))
        else:
            inputs.append(spec.empty(mode, source, symbols.context(names, source) if names else None))
    return inputs


def _graph_modules(module: GraphModule) -> list[tuple[str, GraphModule]]:
    return [(name, m) for name, m in module.named_modules() if isinstance(m, GraphModule)]


def _plain(value: Any) -> bool:
    if isinstance(value, (str, int, float, bool, enum.Enum, type(None))):
        return True
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return isinstance(value, dict) and all(map(_plain, value)) and all(map(_plain, value.values()))


def _plain_metadata(key: str) -> bool:
    return key in ("stack_trace", "custom", "recompute", "ac_graph_id")


def _without_tensors(module: GraphModule) -> GraphModule:
    """The same graph with descriptions in place of the tensors that it holds."""
    if "_checkpoint_context_fn" in module.meta:
        raise NotPortable("the graph has selective activation checkpointing, whose policy is a function")
    lean: GraphModule = GraphModule.__new__(GraphModule)
    children = {}
    for name, child in module._modules.items():
        if not isinstance(child, GraphModule):
            raise NotPortable(f"the graph calls a module of type {type(child).__name__}")
        children[name] = _without_tensors(child)
    lean.__dict__ = {
        **vars(module),
        "meta": {k: v for k, v in module.meta.items() if _plain(v)},
        "compile_subgraph_reason": None,
        "_modules": children,
        "_parameters": {k: v if v is None else TensorSpec.of(k, v) for k, v in module._parameters.items()},
        "_buffers": {k: v if v is None else TensorSpec.of(k, v) for k, v in module._buffers.items()},
    }
    return lean


def _with_tensors(module: GraphModule, mode: FakeTensorMode) -> list[Tensor]:
    """Put empty tensors where the descriptions are; what has to live for as long as they are used."""
    alive = []
    module.meta["dynamo_compile_id"] = None  # its presence tells AOTAutograd where the graph is from
    for held in (module._parameters, module._buffers):
        for name, spec in held.items():
            if spec is not None:
                held[name], fake = spec.empty(mode)  # type: ignore[attr-defined]
                alive.append(fake)
    for child in module._modules.values():
        assert isinstance(child, GraphModule)
        alive += _with_tensors(child, mode)
    return alive


class _Shapes(Interpreter):
    """Notes each node's value as Dynamo does: a method call without it is not cached."""

    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def _propagate(module: GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode) -> None:
    # As Dynamo has it: with torch 2.11 a matrix product in C++ makes numbers of the sizes that vary.
    with mode, enable_python_dispatcher(), torch.random.fork_rng(devices=[]):
        _Shapes(module).run(*inputs)
