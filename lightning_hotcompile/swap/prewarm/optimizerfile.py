"""An optimizer's step as bytes, so that another process can capture and compile the very same graph.

Its graph cannot be packed like others: it has operations that torch's pickler refuses. So the other
process gets a description of the optimizer, builds one that looks like it, and goes the way that the
training goes at the flip.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.described import describe, rebuild
from lightning_hotcompile.swap.prewarm.symbols import NotPortable
from lightning_hotcompile.swap.process.free_memory import give_back_unused


def pack_optimizer(
    swapped: SwappedOptimizer,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    random: str = "eager",
) -> bytes:
    """All that the compile of an optimizer's step depends on; call it right after an eager step.

    Raises:
        NotPortable: the optimizer has something that cannot be described.
    """
    described = describe(swapped.optimizer)
    try:
        return pickle.dumps(
            {
                "state": CompileState.now(),
                "mode": mode,
                "random": random,
                "options": dict(options) if options else None,
                "dynamic": swapped.dynamic,
                "backward_outside": swapped.backward_outside,
                "optimizer": described,
            }
        )
    except Exception as error:  # an option may be anything
        raise NotPortable(f"the options cannot be serialised: {type(error).__name__}: {error}") from error


class _IsCompiled(Exception):  # no error: it ends a step that has no data to go on with
    """The graph is in the caches; there is nothing that it could run on."""


def compile_optimizer(data: bytes) -> None:
    """Compile a packed optimizer's step, so that Inductor's caches have it afterwards.

    Raises:
        NotPortable: the step was not compiled.
    """
    packed = pickle.loads(data)
    with packed["state"].applied():
        optimizer = rebuild(packed["optimizer"])
        give_back_unused()
        settings = packed["mode"], packed["options"], packed["random"]
        inductor = resolve_backend("inductor", *settings, checks_at_once=True)
        gate = Gate(suppress_errors=False)
        region = Region(name="optimizer", kind="optimizer", members=(), class_name=type(optimizer).__name__)
        outside = packed["backward_outside"]  # it has no backward, but the setting is a part of the key
        only = _compile_only(inductor)
        witness = Witness(only, parity="off", backward_outside=outside, raise_errors=True)
        swapped = SwappedOptimizer(region, gate, witness, optimizer=optimizer, dynamic=packed["dynamic"])
        swapped.put(nn.Module())
        gate.open(Lane.COMPILE)
        try:
            with _shown_without_data():
                optimizer.step()
        except _IsCompiled:
            return
        finally:
            gate.close()
            swapped.take_out()
    raise NotPortable(f"the optimizer's step was not compiled: {swapped.error or 'it has no graph'}")


@contextlib.contextmanager
def _shown_without_data() -> Iterator[None]:
    """Tensors are shown by their type: torch 2.11 shows parameters in guards, and these have no memory."""
    with patch.object(torch.Tensor, "__repr__", _show_type):
        yield


def _show_type(tensor: Tensor, **_: Any) -> str:
    return f"<{type(tensor).__name__}>"


def _compile_only(backend: CompiledFn) -> CompiledFn:
    def stop(*_: Any) -> NoReturn:
        raise _IsCompiled

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        backend(graph_module, example_inputs)
        return stop

    return compile_graph
