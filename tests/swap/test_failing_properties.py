"""Modules behind a property of their name that fails."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from tests.hot import STEP, Counting, assert_same, hot
from tests.models import Small, fit, seeded


class Headed(Small):
    """As pytorch-tabular's: the property fails, and Python finds ``self.head`` by ``__getattr__``."""

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        return self._head  # type: ignore[return-value]


def test_a_module_behind_a_property_that_fails_is_compiled() -> None:
    plain, model, backend = seeded(Headed), seeded(Headed), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    report = callback.report
    assert (report.phase, report.graph_breaks, report.recompiles) == ("steady", 0, 0), report.to_text()
    assert backend.graphs == 1
    assert_same(plain, model)


class GivesItSomething(pl.Callback):
    """Sets what the property reads, long after the flip."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 9:
            pl_module._head = nn.Linear(16, 3)
            nn.init.constant_(pl_module._head.weight, 0.1)
            nn.init.zeros_(pl_module._head.bias)


def test_the_property_goes_first_once_it_has_something() -> None:
    plain, model = seeded(Headed), seeded(Headed)
    fit(plain, [GivesItSomething()])
    fit(model, [GivesItSomething(), hot(**STEP, backend=Counting())])
    assert_same(plain, model)
