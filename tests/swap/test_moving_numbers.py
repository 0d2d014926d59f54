"""Numbers that change from step to step and are constants of compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from lightning_hotcompile.swap.tracing.moving_numbers import MOVES, MovingNumbers
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


@pytest.mark.parametrize(
    ("reasons", "found"),
    [
        (["0/1: (0.9*module.coeff) == 9.6", "0/2: (0.9*module.coeff) == 9.5"] * 2, "(0.9*module.coeff)"),
        (["0/1: self.n == 3", "0/2: self.n == 4"], None),
        (["0/1: self.n == 3", "0/2: self.n == 4", "0/3: self.n == -5", "0/4: self.n == 6"], None),
        (["0/1: self.n == 1e-05", "0/2: self.n == -2.5e-06", "0/3: self.n == 0.5"], "self.n"),
        (["0/1: ((-0.1)*f(n)) == (-0.02)", "0/2: ((-0.1)*f(n)) == (-4e-05)"], "((-0.1)*f(n))"),
        (["0/1: self.n == (-3)", "0/2: self.n == (-4)", "0/3: self.n == (-5)"], None),
        (["0/1: self.a == 0.5", "0/2: self.b == 0.5"], None),
        (["0/1: len(L['batch']) == 2  # if self.alpha == 0.5:  # t.py:3 in f"] * 3, None),
        (
            ["0/1: self.a == 0.9  # if self.a == 0.5:", "0/2: self.a == 0.8  # if self.a == 0.5:"] * 2,
            "self.a",
        ),
        (["tensor 'x' size mismatch at index 0. expected 3, actual 4"] * 4, None),
        (["0/1: ___check_obj_id(self.f, 94)"] * 4, None),
    ],
)
def test_the_same_number_again_and_again(reasons: list[str], found: str | None) -> None:
    numbers = MovingNumbers()
    for step, reason in enumerate(reasons):
        numbers.count("one", step, "0", reason)
    numbers.count("one", 9, "1", reasons[0])  # another piece of code
    assert numbers.why_not_again("one") is None, "it may compute numbers only"
    for frame in "01":
        numbers.computes_tensors(frame)
    why = numbers.why_not_again("one")
    assert (why is None) is (found is None)
    assert why is None or why.endswith(str(found))
    assert numbers.why_not_again("other") is None


def test_blocks_that_differ_in_a_number_are_no_number_that_moves() -> None:
    numbers = MovingNumbers()
    for rate in range(6):
        numbers.count("blocks", 1, "0", f"0/{rate}: module.p == 0.{rate}")
    numbers.computes_tensors("0")
    assert numbers.why_not_again("blocks") is None


class Depth(nn.Module):
    """A residual layer that is left out more often the deeper it is."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.layer = rate, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.layer(x), self.rate, self.training)


class Deep(Net):
    """Equal blocks, each with a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Depth(0.05 * i + 0.01) for i in range(6))


def test_such_blocks_stay_compiled() -> None:
    plain, model = seeded(Deep), seeded(Deep)
    fit(plain)
    callback = hot(scope="regions", backend="eager")
    fit(model, [callback])
    assert callback.report.phase == "steady"
    assert_proven(callback.report)
    assert_same(plain, model)


class Decays(Net):
    """A factor that the step itself lowers."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.factor * self.loss(batch)
        self.factor *= 0.99
        return loss


class Averages(Net):
    """What the loss was of late, which is a part of it."""

    mean = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.log("mean", self.mean)
        return (1 + 1e-3 * self.mean) * loss


class Cools(Net):
    """A temperature that a method lowers."""

    temperature = 2.0

    def cool(self) -> float:
        self.temperature = max(0.97 * self.temperature, 0.5)
        return self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) / self.cool()


class Lowest(Net):
    """The lowest loss so far."""

    lowest = float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.lowest = min(self.lowest, loss.item())
        return loss * (1.0 if self.lowest > 0.9 else 0.5)


@pytest.mark.parametrize("threshold", [0, 3])
@pytest.mark.parametrize("kind", [Decays, Averages, Cools, Lowest])
def test_a_number_that_the_step_keeps_is_pythons(kind: type[Net], threshold: int) -> None:
    plain, model = seeded(kind), seeded(kind)
    fit(plain)
    callback = hot(scope="step", threshold=threshold, compile_optimizer=False)
    fit(model, [callback])
    report = callback.report
    assert_proven(report)
    assert report.phase == "steady"
    assert report.recompiles <= 3, report.to_text()
    assert_same(plain, model)
    kept = [[v for v in vars(each).values() if isinstance(v, float)] for each in (plain, model)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4)


class MasksSpans(Net):
    """Spans whose length a function inside rounds by chance, as the masks of speech models are drawn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chance = np.random.rand(1).item()

        def length(share: float) -> int:
            return int(share * 5 + chance)

        spans = length(0.3) + length(0.5)
        mask = np.zeros(spans, dtype=bool)
        return self.loss(batch) * (1 + spans + mask.sum())


def test_a_number_of_an_inner_function_goes_over_a_graph_break() -> None:
    plain, model = seeded(MasksSpans), seeded(MasksSpans)
    np.random.seed(0)
    fit(plain)
    callback = hot(scope="step", compile_optimizer=False)
    np.random.seed(0)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)


class DropsMore(Net):
    """The rate of a dropout, which an operation needs as a plain number."""

    rate = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rate = min(0.5, 0.01 * self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((nn.functional.dropout(x, self.rate), y))


@pytest.mark.parametrize("threshold", [0, 3])
def test_a_step_with_a_number_that_has_to_be_a_constant_is_eager_after_a_few_compiles(threshold: int) -> None:
    plain, model = seeded(DropsMore), seeded(DropsMore)
    fit(plain)
    callback = hot(scope="step", threshold=threshold, on_error="eager", compile_optimizer=False)
    fit(model, [callback])
    report = callback.report
    assert report.phase == "reverted"
    assert MOVES in report.reason
    assert report.recompiles <= 5, "Dynamo's limit is 8"
    assert_same(plain, model)
