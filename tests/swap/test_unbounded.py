"""What is returned beside the loss, and has a finite derivative whatever a later batch holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.graphs.unbounded import divides_by_numbers, unbounded
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded
from tests.swap.test_backward import silent_late


class Embedding(Net):
    """Its embeddings go to a memory and not into the loss; those of one late batch are zeros."""

    smallest = 1e-12

    def embed(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return self.inp(x) * (y > 0)[:, None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.embed(batch)
        shares = h.softmax(-1) / (1 + h.detach().square().sum(-1, keepdim=True))
        z = F.normalize(h, dim=-1, eps=self.smallest)
        loss = F.cross_entropy(self.head(h), batch[1]) + shares.square().mean()
        return {"loss": loss, "z": z, "norm": h.norm(dim=-1)}


class Queue(Embedding):
    """The memory's position is a number: a graph break, over which the embeddings go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, self.inp.out_features))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keep(self, z: torch.Tensor) -> None:
        at = int(self.position)
        self.queue[at : at + len(z)] = z
        self.position[0] = (at + len(z)) % len(self.queue)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.embed(batch)
        self.keep(F.normalize(h, dim=-1))
        return F.cross_entropy(self.head(h), batch[1])


class NoSmallest(Embedding):
    smallest = 0.0


class Counted(Embedding):
    """Divides what it logs by a constant, and what the loss has by a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.embed(batch)
        weight = 1 + (batch[1] > 0).float()
        loss = (F.cross_entropy(self.head(h), batch[1], reduction="none") / weight).mean()
        return {"loss": loss, "size": h.sum() / self.count(batch)}

    def count(self, batch: Any) -> Any:
        return len(batch[1])


class OfSome(Counted):
    """None of a late batch counts."""

    def count(self, batch: Any) -> Any:
        return (batch[1] > 0).sum()


@pytest.mark.parametrize("model_class", [Embedding, Queue, Counted])
def test_embeddings_may_be_normalized_and_a_constant_may_divide(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain, train=silent_late())
    fit(model, [callback], train=silent_late())
    assert all(weight.isfinite().all() for weight in plain.parameters())
    assert_same(plain, model)
    assert_proven(callback.report)


@pytest.mark.parametrize("model_class", [NoSmallest, OfSome])
def test_what_may_be_zero_divides_eagerly(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain, train=silent_late())
    fit(model, [callback], train=silent_late())
    assert all(weight.isfinite().all() for weight in plain.parameters())
    assert_same(plain, model)
    assert "an output that is not used may have no finite derivative" in callback.report.to_text()


X = torch.ones(2, 3, requires_grad=True)


@pytest.mark.parametrize("divisor", [2, 2.5, True])
def test_a_constant_divides(divisor: float) -> None:
    assert not unbounded([X / divisor], by_numbers=False)
    assert unbounded([X / divisor], by_numbers=True)


@pytest.mark.parametrize(
    "divisor", [torch.tensor(2.0), torch.tensor([2]), torch.tensor(2, dtype=torch.int32)]
)
def test_a_tensor_is_no_constant(divisor: torch.Tensor) -> None:
    assert unbounded([X / divisor], by_numbers=False)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x / 2, False),
        (lambda x: x / len(x), False),
        (lambda x: x / x.float().sum(), False),
        (lambda x: x.sum() / x, False),
        (lambda x: x / (x > 0).sum(), True),
        (lambda x: torch.div(x, other=(x > 0).sum()), True),
        (lambda x: x.div_(x.double().sum()), True),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=False) / 2, True),
    ],
)
def test_graphs_that_divide_by_numbers(function: Any, expected: bool) -> None:
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(divides_by_numbers(graph))
        return graph.forward

    torch.compile(function, backend=backend)(torch.ones(3))
    assert found == [expected]


@pytest.mark.parametrize(
    "output",
    [
        X / X.norm(dim=-1, keepdim=True),
        X / (X + 1).norm(dim=-1, keepdim=True).clamp_min(1e-12),
        X / X.sum(-1, keepdim=True).clamp_min(1e-12),
        F.normalize(X.half(), dim=-1),
        F.normalize(X, dim=-1, eps=0.0),
        F.normalize(X, p=0.5, dim=-1),
        torch.linalg.vector_norm(X, 3),
    ],
)
@pytest.mark.parametrize("by_numbers", [False, True])
def test_other_norms_and_quotients_are_unbounded(output: torch.Tensor, by_numbers: bool) -> None:
    assert unbounded([output], by_numbers=by_numbers)


@pytest.mark.parametrize(
    "output",
    [
        F.normalize(X),
        F.normalize(X, p=1),
        F.normalize(X.bfloat16()),
        F.normalize(X.flatten(), dim=0),
        X.norm(),
    ],
)
@pytest.mark.parametrize("by_numbers", [False, True])
def test_norms_are_bounded(output: torch.Tensor, by_numbers: bool) -> None:
    assert not unbounded([output], by_numbers=by_numbers)
