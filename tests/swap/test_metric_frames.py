"""Metrics of torchmetrics that are made in a compiled step: by arithmetic, by comparisons, by their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


class Measured(Small):
    """Two metrics that are updated between the steps; the loss is multiplied by what is asked of them."""

    factor: Callable[[Any, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torchmetrics.MeanMetric(), torchmetrics.SumMetric()

    def on_train_batch_start(self, *_: Any) -> None:
        self.one.update(1.5)
        self.two.update(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * type(self).factor(self, loss.detach())


def is_added(model: Any, loss: Tensor) -> Any:
    return (model.one + model.two).compute()


def is_beside_numbers_and_tensors(model: Any, loss: Tensor) -> Any:
    return ((3 - model.one) / loss).compute() + (loss * abs(-model.two)).compute()


def is_compared(model: Any, loss: Tensor) -> Any:
    return 2.0 if (model.two > 5).compute() else 1.0


def is_taken_for_a_number(model: Any, loss: Tensor) -> Any:
    return 2.0 if model.two == 3 else 1.0  # a metric, and so true


def is_found_in_a_list(model: Any, loss: Tensor) -> Any:
    return 1.0 + [model.one, model.two].index(model.two)  # by the same ==: the first one


def is_updated_as_a_sum(model: Any, loss: Tensor) -> Any:
    both = model.one + model.two
    both.update(loss)
    return both.compute()


def is_made(model: Any, loss: Tensor) -> Any:
    mean = torchmetrics.MeanMetric()
    mean.update(loss)
    return mean.compute()


USES = [
    is_added,
    is_beside_numbers_and_tensors,
    is_compared,
    is_taken_for_a_number,
    is_found_in_a_list,
    is_updated_as_a_sum,
    is_made,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_step_with_a_metric_that(use: Callable[[Any, Tensor], Any]) -> None:
    kind = type("Uses", (Measured,), {"factor": staticmethod(use)})
    plain, model, callback = seeded(kind), seeded(kind), hot(**STEP)
    fit(plain)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    for name in ("one", "two"):
        assert torch.equal(getattr(plain, name).compute(), getattr(model, name).compute())
