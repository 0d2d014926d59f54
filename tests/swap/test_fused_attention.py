"""Attention that is fused in the user's step, and would not be where its graph runs as it was captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import LeavesFrame, compiling_allowed
from lightning_hotcompile.swap.graphs import fused_attention
from lightning_hotcompile.swap.graphs.fused_attention import why_not_as_captured
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.prewarm.run import PrewarmRun
from tests.swap.test_conv_layout import captured

HEADS, QUERIES, KEYS = 2, 128, 256
NEEDED = 16 * 3 * HEADS * QUERIES * KEYS


def inputs() -> list[Tensor]:
    return [torch.randn(3, HEADS, rows, 16) for rows in (QUERIES, KEYS, KEYS)]


def attends(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    found: Any = flex_attention(query, key, value)
    return found.sin()  # type: ignore[no-any-return]


def in_a_checkpoint(*given: Tensor) -> Tensor:
    return checkpoint(attends, *given, use_reentrant=False)  # type: ignore[no-any-return]


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(free: int | None) -> None:
        monkeypatch.setattr(fused_attention, "free_memory", lambda device: free)

    return set_to


@pytest.mark.parametrize("free_bytes", [None, NEEDED, NEEDED - 1])
def test_it_may_run_so_where_its_scores_fit(free: Any, free_bytes: int | None) -> None:
    free(free_bytes)
    graph, _ = captured(attends, *inputs())
    reason = why_not_as_captured(graph)
    assert (reason is None) is (free_bytes != NEEDED - 1)
    assert reason is None or f"it would take {NEEDED >> 20} MB" in reason


def test_other_graphs_may(free: Any) -> None:
    free(0)
    graph, _ = captured(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), *inputs())
    assert why_not_as_captured(graph) is None


def test_a_child_gets_no_graph_whose_step_would_lack_the_memory(free: Any) -> None:
    """The step in which it is traced runs as the user wrote it."""
    free(0)
    run, witness, ran = PrewarmRun.__new__(PrewarmRun), Witness("inductor"), list[GraphModule]()
    run._left_out = []
    run._hand_over = lambda *_: None  # type: ignore[method-assign]

    def collect(region: str, graph: GraphModule, given: Any) -> None:
        run._collect(region, graph, given)
        ran.append(graph)

    witness.collect = collect
    compiled = CompiledFunction(attends, witness.backend_for("one"), dynamic=None, fullgraph=False)
    given = inputs()
    expected = attends(*given)
    with compiling_allowed(suppress_errors=False):
        torch.testing.assert_close(compiled(*given), expected)
    assert not any(map(why_not_as_captured, ran))
    assert run._left_out
    assert all(reason.startswith("one: its attention is fused; eagerly") for reason in run._left_out)


def test_what_leaves_a_frame_is_no_error() -> None:
    """A contract with torch: of a backend's errors this one has the frame run as it is."""

    def backend(graph: GraphModule, _: Any) -> Any:
        raise LeavesFrame("not this one")

    with torch._dynamo.config.patch(suppress_errors=False):
        assert torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(2)).tolist() == [1, 1]
