"""Compiled code that fails leaves no model behind, nor its buffers while eager answers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from lightning_hotcompile.swap.graphs import running
from tests.hot import hot
from tests.models import Net, fit

FAILS_FROM = 5


def refuses(graph: GraphModule, inputs: Any) -> Any:
    raise RuntimeError("no such thing")


class RunsOut:
    """A backend whose code is short of memory after some runs, with a buffer at hand."""

    def __init__(self) -> None:
        self.buffers: list[weakref.ref[Tensor]] = []
        self.alive_in_eager: list[bool] = []

    def __call__(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        code, runs = lookup_backend("aot_eager")(graph, inputs), 0

        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs < FAILS_FROM:
                return code(*args)
            buffer = torch.empty(100)
            self.buffers.append(weakref.ref(buffer))
            raise torch.OutOfMemoryError("out of memory")

        return run


@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize(
    ("backend", "phase"),
    [(refuses, "reverted"), (RunsOut(), "reverted"), ("aot_eager", "steady")],
    ids=["compile", "run", "nothing"],
)
def test_no_model_outlives_its_fit(backend: Any, phase: str, scope: str) -> None:
    models = list[weakref.ref[Net]]()
    for _ in range(3):
        model = Net(n_block=1)
        models.append(weakref.ref(model))
        callback = hot(backend=backend, scope=scope, compile_optimizer=False, on_error="eager")
        fit(model, [callback], max_epochs=4)
        assert callback.report.phase == phase
        del model, callback
        gc.collect()
    assert [ref() for ref in models] == [None] * 3


def test_buffers_of_a_failed_run_are_free_when_eager_answers() -> None:
    backend = RunsOut()

    answered = running.GraphAtWork._answered

    def looks(self: Any, failure: Exception, args: Any, before: Any = None) -> Any:
        eager = self._eager

        def answer(*inputs: Any) -> Any:
            backend.alive_in_eager.append(any(ref() is not None for ref in backend.buffers))
            return eager(*inputs)

        self._eager = answer
        return answered(self, failure, args, before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.GraphAtWork, "_answered", looks)
        fit(
            Net(n_block=1),
            [hot(backend=backend, scope="step", compile_optimizer=False, on_error="eager")],
            max_epochs=1,
        )
    assert backend.alive_in_eager[0] is False
