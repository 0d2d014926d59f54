"""Compiled code runs once in the child process, on numbers that mean nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from lightning_hotcompile.swap.prewarm import rehearsal
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.graphfile import compile_packed, pack
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm
from lightning_hotcompile.swap.prewarm.rehearsal import rehearse
from lightning_hotcompile.swap.prewarm.tensor_spec import TensorSpec

NOTHING = GraphModule({}, Graph())


def hollow(value: Tensor) -> Tensor:
    """The same without memory, as a child process has it."""
    found, memory = TensorSpec.of("x", value).hollow()
    memory.untyped_storage().resize_(0)
    return found


class Seen:
    """Compiled code that remembers what it was given, and whether its backward ran."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.slopes: list[Tensor] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, int]:
        self.given = [x.detach().clone() for x in inputs]
        out = sum(x.sum() for x in inputs if x.is_floating_point())
        assert isinstance(out, Tensor)
        if out.requires_grad:
            out.register_hook(self.slopes.append)
        return out, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_runs_forward_and_backward_on_random_numbers(dtype: torch.dtype) -> None:
    seen = Seen()
    x = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
    part = torch.zeros(8, 10, dtype=dtype)[2:6, 1:9:2].t()
    rehearse(seen, [hollow(x), hollow(part)], NOTHING)
    assert [x.shape for x in seen.given] == [(4, 3), (4, 4)]
    assert all(x.isfinite().all() and x.unique().numel() > 4 for x in seen.given)
    assert [slope.item() for slope in seen.slopes] == [1]


def test_what_may_name_a_place_is_zero() -> None:
    seen = Seen()
    names = [torch.full((5,), 7), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.uint8)]
    rehearse(seen, [hollow(x) for x in (*names, torch.ones(2, dtype=torch.complex64))], NOTHING)
    assert not any(x.any() for x in seen.given)
    assert not seen.slopes


def test_what_a_graph_holds_has_memory_too() -> None:
    held = GraphModule({"weight": nn.Parameter(hollow(torch.zeros(6)))}, Graph())
    held.register_parameter("weight", nn.Parameter(hollow(torch.zeros(6))))
    rehearse(Seen(), [], held)
    (weight,) = held.parameters()
    assert weight.unique().numel() > 3


def test_an_error_says_nothing() -> None:
    def refuses(*inputs: Any) -> None:
        raise IndexError("index out of range in self")

    rehearse(refuses, [hollow(torch.ones(2))], NOTHING)


@pytest.mark.parametrize("what", ["large", "elsewhere", "a size"])
def test_what_is_not_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(rehearsal, "MOST_BYTES", 1000)
    inputs = {"large": hollow(torch.ones(251)), "elsewhere": torch.ones(2, device="meta"), "a size": 5}
    rehearse(seen, [inputs[what]], NOTHING)
    assert not seen.given


@pytest.mark.parametrize(("operation", "shape"), [("while_loop", (3,)), ("sin", (251,)), (None, ())])
def test_what_the_graph_does_is_looked_at_first(
    operation: str | None, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that numbers end, and tensors that are larger than the inputs."""
    seen, graph = Seen(), Graph()
    monkeypatch.setattr(rehearsal, "MOST_BYTES", 1000)
    if operation is not None:
        graph.call_method(operation, (graph.placeholder("x"),)).meta["example_value"] = (
            hollow(torch.ones(shape)),
            None,
        )
    rehearse(seen, [hollow(torch.ones(3))], GraphModule({}, graph))
    assert bool(seen.given) is (operation is None)


def graph_of(function: Any, *inputs: Tensor) -> bytes:
    """What a child process is given of a function."""
    found: list[bytes] = []

    def keep(graph_module: GraphModule, examples: Sequence[Any]) -> Any:
        found.append(pack(graph_module, examples))
        return lambda *_: (torch.zeros((), requires_grad=True),)

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*inputs)
    (packed,) = found
    return packed


def far_away(x: Tensor) -> Tensor:
    """Reads what is not its own: eager would raise, and Inductor does not look."""
    return x.as_strided((3, 64), (1 << 40, 1)).sum()


def whole(x: Tensor) -> Tensor:
    return x.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "state"), [(far_away, "crashed"), (whole, "done")])
def test_code_that_ends_its_process_ends_the_child(
    function: Any, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    packed, late = graph_of(function, torch.ones(64, requires_grad=True)), time.monotonic() + 300
    with Prewarm(cache_dir=tmp_path) as child:
        child.add(Job(name="step", graph=packed))
        child.close()
        while child.poll().state == "running" or (child.poll().state == "done" and not child.poll().results):
            assert time.monotonic() < late
            threading.Event().wait(0.05)
        status = child.poll()
    assert status.state == state, status.reason
    if state == "done":
        assert status.reason is None
    else:  # its last words may follow
        assert str(status.reason).startswith("the child process was ended by SIGSEGV")


@pytest.mark.slow
def test_what_is_compiled_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[float] = []
    prior = rehearsal._forward_and_backward

    def counted(compiled: Any, inputs: Sequence[Any]) -> None:
        prior(compiled, inputs)
        ran.append(inputs[0].grad.abs().sum().item())

    packed = graph_of(whole, torch.ones(64, requires_grad=True))
    monkeypatch.setattr(rehearsal, "_forward_and_backward", counted)
    monkeypatch.setattr(
        CompileState, "applied", lambda self: contextlib.nullcontext()
    )  # that of this process
    compile_packed(packed)
    (slope,) = ran
    assert slope > 1
