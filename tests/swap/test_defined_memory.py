"""What was never written to is zero in what is compiled, so that it can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hotcompile.swap.graphs.witness import Witness
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


def dropped_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1).bernoulli_(0.9)


FOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(3, 4, dtype=x.dtype),
    "empty by keywords": lambda x: torch.empty(size=(3, 4), device=x.device, requires_grad=False),
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.preserve_format),
    "new_empty": lambda x: x.new_empty((3, 4), dtype=torch.float64),
    "of whole numbers": lambda x: torch.empty(3, dtype=torch.int32),
}


@pytest.mark.parametrize("name", FOUND)
def test_memory_as_it_was_found_is_zero(name: str) -> None:
    found, targets = FOUND[name], list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    witness = Witness(backend, parity="off")
    x = torch.ones(3, 4)
    like = found(x)
    result = torch.compile(lambda x: found(x), backend=witness.backend_for("step"))(x)
    torch._dynamo.reset()
    assert (result.shape, result.dtype, result.stride()) == (like.shape, like.dtype, like.stride())
    assert not result.any()
    assert not any("empty" in str(getattr(target, "__name__", target)) for target in targets)


def test_a_layout_that_zeros_cannot_have_is_left_alone() -> None:
    witness = Witness("eager", parity="off")
    made = torch.compile(
        lambda x: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last) * 0 + x,
        backend=witness.backend_for("step"),
    )
    assert made(torch.ones(1)).shape == (2, 3, 4, 4)
    torch._dynamo.reset()


class Filled(Net):
    """Fills its buffer after a graph break, as solvers of differential equations do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        states = torch.empty(3, *x.shape)
        states[0] = x
        torch._dynamo.graph_break()
        for i in range(1, 3):
            states[i] = states[i - 1] * 0.5
        return F.cross_entropy(self(states.mean(0)), y)


def test_a_buffer_that_is_filled_after_a_graph_break_is_compiled() -> None:
    plain, model, callback = seeded(Filled), seeded(Filled), hot(scope="step")
    fit(plain)
    fit(model, [callback])
    assert callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model)
