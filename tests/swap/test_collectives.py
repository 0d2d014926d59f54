"""Collectives in compiled code: Python calls them, once each, as it does without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed, graph_break_count
from lightning_hotcompile.swap.graphs.witness import Witness

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


@pytest.fixture(autouse=True)
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=45)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def reduces(x: Tensor) -> Tensor:
    total = (x * x).sum()
    dist.all_reduce(total)
    return total * 2


def reduces_a_number(x: Tensor) -> Tensor:
    rows = torch.tensor(float(len(x)))
    dist.all_reduce(rows)
    return (x * x).sum() / rows


def gathers_a_number(x: Tensor) -> Tensor:
    total = (x * x).sum()
    found = [torch.zeros_like(total)]
    dist.all_gather(found, total.detach())
    return total + found[0]


def scatters(x: Tensor) -> Tensor:
    part = torch.zeros_like(x)
    dist.reduce_scatter_tensor(part, x.detach())
    return (x * part).sum()


def through_autograd(x: Tensor) -> Tensor:
    return dist.nn.functional.all_reduce((x * x).sum()) * 2  # type: ignore[attr-defined]


def in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(reduces, x, use_reentrant=False)  # type: ignore[no-any-return]


def functional(x: Tensor) -> Tensor:
    total = (x * x).sum()
    return total + dist._functional_collectives.all_reduce(total.detach(), "sum", dist.group.WORLD)


STEPS = (
    reduces,
    reduces_a_number,
    gathers_a_number,
    scatters,
    through_autograd,
    in_a_checkpoint,
    functional,
)


def run(function: Callable[[Tensor], Tensor], group: Any) -> tuple[float, Tensor | None, int]:
    """What comes out, its gradient, and how many collectives ran."""
    x, before = torch.arange(3.0, requires_grad=True), number_of(group)
    out = function(x)
    out.backward()
    return out.item(), x.grad, number_of(group) - before


def number_of(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_each_runs_once_and_gives_what_eager_gives(step: Callable[[Tensor], Tensor], group: Any) -> None:
    compiled = CompiledFunction(step, Witness("aot_eager").backend_for("one"), dynamic=None, fullgraph=False)
    expected = run(step, group)
    assert expected[2] > 0
    for _ in range(3):
        with compiling_allowed(suppress_errors=True):
            out, gradient, n = run(compiled, group)
        assert (out, n) == (expected[0], expected[2])
        assert torch.equal(gradient, expected[1])


def test_what_is_around_it_is_compiled() -> None:
    witness, before = Witness("aot_eager"), graph_break_count()
    compiled = CompiledFunction(reduces, witness.backend_for("one"), dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        compiled(torch.ones(3))
    assert [g.runs for g in witness.graphs] == [1, 1]
    assert graph_break_count() > before


@pytest.mark.parametrize("collects", [False, True])
def test_a_graph_that_holds_one_is_refused_with_the_reason(group: Any, collects: bool) -> None:
    witness, collected = Witness("aot_eager"), []
    if collects:
        witness.collect = lambda *graph: collected.append(graph)
    compiled = CompiledFunction(functional, witness.backend_for("one"), dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=True):
        run(compiled, group)
    assert witness.error_of("one") == (
        "it holds collectives of torch.distributed (_c10d_functional.all_reduce, "
        "_c10d_functional.wait_tensor), which are left to eager"
    )
    assert (witness.watch.total_runs, collected) == (0, [])
