"""Losses that are modules and made in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_same, hot
from tests.models import Small, fit, seeded

TARGET = torch.tensor([1, 2])


class Kept:
    """What the functions write down."""

    found: Any = None
    loss: Any = None


def is_called(kept: Kept, x: Tensor) -> Tensor:
    loss = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1, weight=x[0].abs())
    return loss(input=x.sin(), target=TARGET)


def lives_on_after_a_break(kept: Kept, x: Tensor) -> Tensor:
    loss = nn.CrossEntropyLoss(x[0].abs() + 1)
    x = x.sin()
    torch._dynamo.graph_break()
    return loss(x, TARGET) * loss.weight.sum()


class Matching(nn.Module):
    """A loss that is made of another module, as for detection."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher = nn.Softmax(1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.matcher(x), target)


def has_a_part(kept: Kept, x: Tensor) -> Tensor:
    loss = Matching()
    x = x.sin()
    torch._dynamo.graph_break()
    return loss.to(x.device)(x, TARGET)


def is_kept(kept: Kept, x: Tensor) -> Tensor:
    kept.loss = nn.CrossEntropyLoss(ignore_index=7).to(x.device).eval()
    kept.found = kept.loss.ignore_index, kept.loss.training
    return kept.loss(x.sin(), TARGET)


def is_asked_what_it_is(kept: Kept, x: Tensor) -> Tensor:
    loss = nn.CrossEntropyLoss()
    kept.found = (
        isinstance(loss, nn.Module),
        callable(loss),
        hasattr(loss, "reduction"),
        hasattr(loss, "other"),
    )
    try:
        kept.found += (loss.other,)
    except AttributeError:
        kept.found += ("none",)
    return loss(x.sin(), TARGET)


def is_changed(kept: Kept, x: Tensor) -> Tensor:
    losses = nn.ModuleList([nn.CrossEntropyLoss(), nn.MSELoss()])
    losses[0].reduction = "sum"
    return losses[0](x.sin(), TARGET) + losses[1](x, x.sin())


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        (is_called, 1),
        (lives_on_after_a_break, 2),
        (has_a_part, 2),
        (is_kept, 1),
        (is_asked_what_it_is, 1),
        (is_changed, 1),
    ],
)
def test_one_is_as_in_eager(function: Callable[[Kept, Tensor], Tensor], pieces: int) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    plain, ours = Kept(), Kept()
    with compiling_allowed(suppress_errors=False):
        for seed in range(4):
            x = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(compiled.compile(ours, x), function(plain, x))
            assert ours.found == plain.found
            assert type(ours.loss) is type(plain.loss)
    assert backend.graphs == pieces


class MakesItsLoss(Small):
    """Makes the loss first; then comes a network in which a graph ends."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        torch._dynamo.graph_break()
        return out * 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.CrossEntropyLoss()
        return loss(self(batch[0]), batch[1])


def test_a_step_that_makes_its_loss_runs_compiled() -> None:
    plain, model, backend = seeded(MakesItsLoss), seeded(MakesItsLoss), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert callback.phase == "steady", callback.report.to_text()
    assert_same(plain, model)
    report = callback.report
    assert (report.graph_breaks, report.recompiles) == (1, 0)
    assert "runs eagerly" not in report.to_text()
    assert backend.graphs >= 3  # before and after the break, and the loss
