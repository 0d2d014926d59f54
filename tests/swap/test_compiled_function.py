"""A compiled function, where another thread calls one at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction


def in_a_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_what_is_compiled_while_another_thread_is_in_a_call_is_found_again() -> None:
    is_in_call, may_return, graphs, seconds = threading.Event(), threading.Event(), [], 60.0

    def waits(x: Tensor) -> Tensor:
        is_in_call.set()
        may_return.wait(seconds)
        return x

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        if len(graphs) == 1:
            others.append(in_a_thread(lambda: other().reuse(torch.ones(2))))
            assert is_in_call.wait(seconds)
        return graph.forward

    def other() -> CompiledFunction:
        return CompiledFunction(waits, backend, dynamic=None, fullgraph=False)

    def train() -> None:
        compiled = CompiledFunction(lambda x: x + 1, backend, dynamic=None, fullgraph=False)
        for _ in range(3):
            compiled.compile(torch.ones(2))
            may_return.set()
            others[0].join()

    others: list[threading.Thread] = []
    in_a_thread(train).join()
    assert len(graphs) == 1
