"""A step that captures a CUDA graph of its own: whoever waits for the GPU then ends that with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap import onlookers
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.parity import clones
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from tests.hot import Counting
from tests.models import Block

Capture = Callable[[bool], None]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Begins one and ends it; meanwhile the state of generators cannot be read, as on a GPU."""
    now = False
    prior = clones.RandomState.__init__

    def read(state: Any) -> None:
        assert not now, "operation not permitted when stream is capturing"
        prior(state)

    def begins(begun: bool) -> None:
        nonlocal now
        now = begun

    monkeypatch.setattr(clones.RandomState, "__init__", read)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)
    return begins


def test_without_a_gpu_in_use_none_is_captured() -> None:
    assert not onlookers.captures_cuda_graph()


def test_a_region_is_not_compiled_meanwhile(capture: Capture) -> None:
    block, backend = Block(8), Counting()
    root, gate, witness = nn.Sequential(block), Gate(), Witness(backend)
    region = Region(name="region", kind="module", members=("0",), class_name="Block")
    swapped = SwappedRegion(region, gate, witness, dynamic=None, fullgraph=False)
    swapped.put(root)
    x, found = torch.randn(4, 8), list[int]()
    expected = block._call_impl(x)
    for begun in (True, True, False):
        gate.open(Lane.COMPILE)
        capture(begun)
        torch.testing.assert_close(root(x), expected)
        capture(False)
        gate.close()
        found.append(backend.graphs)
    swapped.take_out()
    assert found == [0, 0, 1]
    assert witness.error_of("region") is None


@pytest.mark.parametrize("runs_before", [1, 3, 20])
def test_a_run_of_compiled_code_is_not_looked_at_meanwhile(capture: Capture, runs_before: int) -> None:
    """Eager answers as long as runs would be looked at: that code is all there is in it."""
    backend = Counting()
    witness, x = Witness(backend), torch.randn(4)
    compiled = torch.compile(lambda x: x.sin() * 2, backend=witness.backend_for("one"))
    for _ in range(runs_before):
        compiled(x)
    before = backend.runs
    capture(True)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    capture(False)
    assert backend.runs == before + (runs_before > 11)
    compiled(x)
    assert backend.runs == before + 1 + (runs_before > 11)
    assert witness.error_of("one") is None


def test_nor_is_its_first_run_compared(capture: Capture) -> None:
    backend = Counting()
    witness = Witness(backend)
    graphs: list[Any] = []

    def keeps(graph: Any, inputs: Any) -> Any:
        graphs.append(witness.backend_for("one")(graph, inputs))
        return graphs[0]

    x = torch.randn(4)
    torch.compile(lambda x: x.cos(), backend=lambda g, i: (keeps(g, i), g.forward)[1])(x)
    (run,) = graphs
    capture(True)
    torch.testing.assert_close(run(x)[0], x.cos())
    assert backend.runs == 0
    capture(False)
    torch.testing.assert_close(run(x)[0], x.cos())
    assert witness.graphs_of("one")[0].parity is not None


def test_a_frame_that_is_called_in_it_runs_as_the_user_wrote_it(capture: Capture) -> None:
    backend = Counting()
    witness, x = Witness(backend), torch.randn(4)

    def step(x: Tensor) -> Tensor:
        return x.sin() + 1

    capture(True)
    compiled = torch.compile(step, backend=witness.backend_for("one"))
    torch.testing.assert_close(compiled(x), step(x))
    capture(False)
    assert backend.graphs == 0
    assert witness.graphs_of("one") == []
