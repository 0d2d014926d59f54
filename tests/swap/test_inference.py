"""Inference mode within a training step, as metrics of libraries enter it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


@torch.inference_mode()
def share_right(logits: Tensor, y: Tensor) -> Tensor:
    """As a library's function has it: a decorator."""
    return (logits.argmax(1) == y).float().mean()


class Watched(Net):
    """Remembers what it has measured."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []
        self.last: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.last = self.measured(logits, y)
        self.log("loss", loss)
        return loss * 2

    def measured(self, logits: Tensor, y: Tensor) -> Tensor:
        return share_right(logits, y)

    def on_train_batch_end(self, *_: Any) -> None:
        assert not torch.is_inference_mode_enabled()
        self.found.append(float(self.last))


class InTheStep(Watched):
    """The mode is entered by the step itself, which has no more to do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        with torch.inference_mode():
            self.last = (logits.argmax(1) == batch[1]).float().mean() + loss
        return loss


class LeavesIt(Watched):
    """The other way round."""

    def measured(self, logits: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            right = self.within(logits, y)
            with torch.inference_mode(False):
                return right.clone() * logits.detach().std()

    def within(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.softmax(1).argmax(1) == y).float().mean()


@pytest.mark.parametrize(
    ("model_class", "scope", "backend"),
    [
        pytest.param(Watched, "step", "inductor", marks=pytest.mark.slow),
        (Watched, "auto", "aot_eager"),
        (InTheStep, "step", "aot_eager"),
        pytest.param(InTheStep, "auto", "inductor", marks=pytest.mark.slow),
        pytest.param(LeavesIt, "step", "inductor", marks=pytest.mark.slow),
        (LeavesIt, "auto", "aot_eager"),
    ],
)  # each two of the three in some case
def test_the_rest_of_the_step_is_compiled(model_class: type[Watched], scope: str, backend: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, backend=backend)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert model.found == pytest.approx(plain.found, rel=1e-4)
    report = callback.report
    (step, *_) = report.regions
    assert (step.kind, step.proven, report.phase) == ("step", True, "steady"), report.reason
    assert report.graph_breaks >= 1
    assert "agree with eager" in report.parity
    assert "NOT" not in report.parity
