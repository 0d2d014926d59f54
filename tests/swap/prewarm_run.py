"""A training in short for test_prewarm: capture, compile in a child, compile here. Prints what was hit."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.inductor.compilers import backward_with_forward, resolve_backend
from lightning_hotcompile.swap.optimizers.optimizer_step import bare_step
from lightning_hotcompile.swap.prewarm.graphfile import pack
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm
from tests.models import Block

Case = tuple[str, Callable[..., Any], tuple[Any, ...], Callable[[], Any]]


def cases(length: int = 7) -> list[Case]:
    """With ``length``, that of a sequence which varies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(16, 0.1), nn.Linear(16, 3))
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    original = bare_step(torch.optim.AdamW)

    def training_step(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y)

    def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            original(optimizer)

    def bf16() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def of_any_length(module: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
        time = x.shape[1]
        later = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = (x @ x.transpose(1, 2)).masked_fill(later | ~keep[:, None], -1e9).softmax(-1)
        return module(weights @ x).square().sum() / time

    text = torch.randn(3, length, 8)
    keep = text[..., 0].sigmoid() > 0.5
    for tensor in (text, keep):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    hidden = (torch.randn(4, 16, requires_grad=True) * 2).t().contiguous().t()
    return [
        ("step", training_step, (model, x, y), contextlib.nullcontext),
        ("bf16", training_step, (model, x, y), bf16),
        ("block", lambda m, x: m(x).square().mean(), (model[1], hidden), contextlib.nullcontext),
        ("dynamic", of_any_length, (model, text, keep), contextlib.nullcontext),
        ("optimizer", optimizer_step, (optimizer,), contextlib.nullcontext),
    ]


def run(case: Case, backend: Callable[..., Any]) -> None:
    _, function, arguments, context = case
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=True)
    with context():
        out = compiled(*arguments)
    if isinstance(out, Tensor):
        out.backward()


def main(cache_dir: str, prewarm: bool) -> None:
    torch.set_num_threads(1)
    jobs: list[Job] = []
    for case in cases():

        def trace_only(gm: GraphModule, inputs: Sequence[Any], name: str = case[0]) -> Callable[..., Any]:
            jobs.append(Job(name=name, graph=pack(gm, inputs)))
            return gm.forward

        run(case, trace_only)
    results = []
    if prewarm:
        with Prewarm(cache_dir=cache_dir, toolchain=["cpu"]) as child:
            for job in jobs:
                child.add(job)
            while (status := child.poll()).state == "running":
                threading.Event().wait(0.1)
        results = [vars(r) for r in status.results]
    inductor = resolve_backend("inductor", None, None)

    def real(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with backward_with_forward():
            return inductor(gm, inputs)

    report: dict[str, Any] = {"results": results}
    for case in cases(length=9):
        counters.clear()
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        run(case, real)
        report[case[0]] = {
            "hits": counters["aot_autograd"]["autograd_cache_hit"],
            "misses": counters["aot_autograd"]["autograd_cache_miss"]
            + counters["inductor"]["fxgraph_cache_miss"]
            + counters["inductor"]["fxgraph_cache_bypass"],
            "wall_s": time.perf_counter() - wall,
            "cpu_s": sum(os.times()[:4]) - cpu,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "prewarm")
