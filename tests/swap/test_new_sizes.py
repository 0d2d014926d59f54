"""Sizes that are new in each step are compiled for at once, wherever in the step they are met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, loader, seeded

N = 500


class Masked(Small):
    """A loss over what a mask has left."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        valid = x[:, 0] > 0
        return F.cross_entropy(self(x)[valid], y[valid])


class Chosen(Small):
    """Rows that are chosen by two functions, one after the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        rows = torch.nonzero(x[:, 1] > -0.5)[:, 0]
        hidden, labels = self(x[rows]), y[rows]
        wrong = torch.where(hidden.argmax(1) != labels)[0]
        return F.cross_entropy(hidden, labels) + self.penalty(hidden, wrong)

    def penalty(self, hidden: Tensor, rows: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return 1e-2 * hidden[rows].square().sum() / len(hidden)


class Cut(Small):
    """Only the first rows, as many as a tensor says."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        n = 8 + int((x[:, 0] > 0).sum().item())
        return F.cross_entropy(self(x[:n]), y[:n])


class WithoutDiagonal(Small):
    """Similarities of all pairs: a mask that always leaves as many."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = F.normalize(self(x))
        others = ~torch.eye(len(x), dtype=torch.bool)
        pairs = (hidden @ hidden.T)[others].view(len(x), len(x) - 1)
        return F.cross_entropy(self(x), y) + 1e-2 * pairs.logsumexp(1).mean()


class Sizes:
    """A backend that notes whether graphs have sizes for inputs."""

    def __init__(self) -> None:
        self.graphs, self.symbolic = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.symbolic += any(isinstance(each, torch.SymInt) for each in inputs)
        return graph.forward


def trained(kind: type[Small], data: Any, **options: Any) -> Any:
    """The report of a training that ended as one without the callback."""
    plain, model = seeded(kind), seeded(kind)
    fit(plain, train=data())
    callback = hot(**{**STEP, **options})
    fit(model, [callback], train=data())
    assert_same(plain, model)
    assert_proven(callback.report)
    return callback.report


def rows() -> DataLoader[Any]:
    return loader(12 * N, N)


@pytest.mark.parametrize("kind", [Masked, Chosen, Cut])
def test_sizes_that_depend_on_data(kind: type[Small]) -> None:
    backend = Sizes()
    report = trained(kind, rows, backend=backend)
    assert report.graph_breaks
    assert report.recompiles == 0, report.to_text()
    assert backend.symbolic


def test_a_mask_that_leaves_as_many_each_time_is_compiled_for_these() -> None:
    backend = Sizes()
    report = trained(WithoutDiagonal, rows, backend=backend)
    assert report.graph_breaks == 1
    assert backend.graphs == 2
    assert backend.symbolic == 0


def test_none_where_sizes_are_not_to_be_dynamic() -> None:
    backend = Sizes()
    trained(Masked, rows, backend=backend, dynamic=False, on_error="eager")
    assert backend.symbolic == 0


class Cloud:
    """Points and their classes, in an object of the user's."""

    def __init__(self, points: Tensor, labels: Tensor) -> None:
        self.points, self.labels = points, labels


def clouds() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in (23, 31, 29, 37, 43, 41, 53, 47, 59, 61, 67, 71) * 3:
        found.append(
            Cloud(torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        )
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


class Clouds(Small):
    """A step that breaks, and a function of its own that does, with as many rows as there are points."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self(batch.points)
        torch._dynamo.graph_break()
        return self.scored(hidden, batch.labels, len(batch.points))

    def scored(self, hidden: Tensor, labels: Tensor, n: int) -> Tensor:
        loss = F.cross_entropy(hidden, labels, reduction="sum")
        torch._dynamo.graph_break()
        return (loss + hidden.square().sum()) / n


def test_objects_whose_sizes_vary_are_compiled_once() -> None:
    report = trained(Clouds, clouds)
    assert report.graph_breaks
    assert report.recompiles == 0, report.to_text()


@torch.compiler.disable
def seven() -> int:
    return 7


SEVENTH: dict[str, Any] = {
    "power": lambda x, n: x.tanh() ** n,
    "loop": lambda x, n: sum((x.tanh() + i for i in range(n)), x),
    "column": lambda x, n: x * x[:, n : n + 1],
    "roll": lambda x, n: x.roll(n, 1),
    "factor": lambda x, n: x / n + n // 2 + n % 3,
    "rate": lambda x, n: F.dropout(x, n / 100),
    "key": lambda x, n: x * {7: 2.0}[n] * [1, 2][n % 2],
    "branch": lambda x, n: x + 1 if n > 6 else x.exp(),
    "part": lambda x, n: torch.cat([x.topk(n)[0], x.split(n, 1)[1]], 1),
}


@pytest.mark.parametrize("use", SEVENTH.values(), ids=SEVENTH)
def test_a_number_that_no_tensor_measures_and_that_stays(use: Any) -> None:
    class Seventh(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((use(2 * x, seven()), y))

    report = trained(Seventh, rows)
    assert report.graph_breaks == 1
    assert report.recompiles == 0, report.to_text()
