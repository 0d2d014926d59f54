"""Flags that modules keep in buffers: a branch on one ends no graph, and is the one that eager takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

STEPS = 24


class Norm(nn.Module):
    """Takes its scale from the first batch, as Glow's does."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("initted", flag)

    def start(self, x: Tensor) -> None:
        if self.initted:
            return
        self.scale.data.copy_(1 / x.std(0))
        self.initted.data.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.start(x)
        return self.scale * x


class ByItem(Norm):
    def start(self, x: Tensor) -> None:
        if self.training and self.initted.item() == 0:
            self.scale.data.copy_(1 / x.std(0))
            self.initted.fill_(1)


class ByNot(Norm):
    def start(self, x: Tensor) -> None:
        is_new = not self.initted
        if is_new:
            self.scale.data.copy_(1 / x.std(0))
            self.initted = torch.ones_like(self.initted)


class Model(Small):
    """Several in a loop; a hook has the first one start anew in the middle of the run, if it is told to."""

    def __init__(self, kind: type[Norm], flag: Callable[[], Tensor], again: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(kind(flag()) for _ in range(2))
        self.again = again

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for norm in self.norms:
            x = norm(x)
        return self.loss((x, y))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.again and self.global_step in (12, 16):
            self.norms[0].initted.fill_(0)


KINDS = [
    (Norm, lambda: torch.tensor(False)),
    (Norm, lambda: torch.Tensor([False])),
    (ByItem, lambda: torch.tensor(0, dtype=torch.uint8)),
    (ByNot, lambda: torch.tensor(False)),
]


@pytest.mark.parametrize(("kind", "flag"), KINDS)
def test_a_flag_ends_no_graph(kind: type[Norm], flag: Callable[[], Tensor]) -> None:
    plain, model = (seeded(lambda: Model(kind, flag)) for _ in range(2))
    callback = hot(fullgraph=True, **STEP)
    fit(plain)
    fit(model, [callback])
    assert_proven(callback.report)
    assert callback.report.regions[0].graphs == 1
    assert_same(plain, model, tolerance=0.0)


@pytest.mark.parametrize(("kind", "flag"), KINDS)
def test_a_flag_that_changes_later_is_seen(kind: type[Norm], flag: Callable[[], Tensor]) -> None:
    plain, model = (seeded(lambda: Model(kind, flag, again=True)) for _ in range(2))
    callback = hot(**STEP)
    fit(plain)
    fit(model, [callback])
    assert_proven(callback.report)
    assert callback.report.recompiles <= 1
    assert_same(plain, model, tolerance=0.0)


class Twice(Norm):
    """Asked once more after it has been changed, by its own name and through a view."""

    def forward(self, x: Tensor) -> Tensor:
        self.initted.data.logical_not_()
        if self.initted:
            x = 2 * x
        self.view.logical_not_()
        return x + 1 if self.other else x

    def __init__(self, flag: Tensor) -> None:
        super().__init__(flag)
        self.register_buffer("other", torch.tensor(True))
        self.view = self.other.view(1)


def test_a_flag_that_the_step_has_changed_is_asked_anew() -> None:
    plain, model = (seeded(lambda: Model(Twice, lambda: torch.tensor(True))) for _ in range(2))
    callback = hot(**STEP, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=0.0)


class Absent(Norm):
    """Is there or not, whatever is in it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.initted is None else x * self.scale


def test_whether_a_buffer_is_there_asks_for_no_number() -> None:
    callback = hot(**STEP)
    fit(seeded(lambda: Model(Absent, lambda: torch.tensor(True), again=True)), [callback])
    assert_proven(callback.report)
    assert callback.report.recompiles == 0


class Counts(Norm):
    """Counts its steps, and asks for the number."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__(flag)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        n = self.n.item()
        self.n += 1
        return x * self.scale if n % 2 else x


class OfBatch(Small):
    """What comes with a batch is no flag of the module's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((2 * x if y[0] else x, y))


@pytest.mark.parametrize("make", [lambda: Model(Counts, lambda: torch.tensor(True)), OfBatch])
def test_numbers_that_change_each_time_are_no_flags(make: Callable[[], Any]) -> None:
    plain, model = seeded(make), seeded(make)
    callback = hot(**STEP)
    fit(plain)
    fit(model, [callback])
    assert callback.report.recompiles <= 4
    assert_same(plain, model, tolerance=0.0)
