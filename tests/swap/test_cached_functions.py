"""Functions behind ``functools.cache`` in a step: they make what eager code makes, and end no graph."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

RUN: list[str] = []
"""The bodies that ran, in their order."""

STEPS = 48


@functools.cache
def noise(width: int) -> Tensor:
    """Drawn once, and the same in each step from then on."""
    RUN.append("noise")
    return torch.randn(width)


ON = {"noise": True}


@functools.lru_cache(maxsize=8)
def is_on(name: str = "noise") -> bool:
    RUN.append("is_on")
    return ON[name]


@functools.lru_cache
def settings(width: int, *, scale: float) -> tuple[Any, ...]:
    RUN.append("settings")
    return width, scale, torch.float32, torch.device("cpu"), None, "mean"


@functools.lru_cache
def tables(width: int) -> tuple[Tensor, tuple[Tensor, int]]:
    RUN.append("tables")
    angle = torch.arange(width) / width
    return angle.cos(), (angle.sin(), 2)


class Asks(Net):
    """Makes use of all of them."""

    in_width, scale, wanted = 8, 0.5, "noise"

    def moved(self, x: Tensor) -> Tensor:
        width, scale, dtype, device, nothing, reduction = settings(self.in_width, scale=self.scale)
        if is_on(self.wanted) and nothing is None:
            x = x + scale * noise(width)
        cos, (sin, two) = tables(x.shape[1])
        return (x * cos + two * sin).to(device, dtype) if reduction == "mean" else x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(self.moved(batch[0])), batch[1])
        self.log("loss", loss)
        return loss


class Forgets(Asks):
    """What a cache has held is made anew in the middle of the run."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == STEPS // 2:
            noise.cache_clear()


@functools.cache
def history() -> list[float]:
    return []


class Remembers(Net):
    """Writes in each step to what a cache holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        history().append(float(batch_idx))
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + 0.01 * len(history()))


@functools.cache
def of_width(width: int) -> float:
    RUN.append("of_width")
    if width == 8:
        raise ValueError(width)
    return 1.0


class Falls(Net):
    """Asks for what raises, which no cache holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            scale = of_width(8)
        except ValueError:
            scale = 0.5
        return scale * F.cross_entropy(self(batch[0]), batch[1])


class HasItsOwn(Net):
    """The cache is in front of a method."""

    @functools.lru_cache  # noqa: B019
    def offset(self, width: int) -> Tensor:
        RUN.append("offset")
        return torch.randn(width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + self.offset(8)), batch[1])


@functools.cache
def named(name: str) -> Tensor:
    RUN.append(name)
    return torch.randn(8)


class AsksForAnotherEachTime(Net):
    """What is asked for is made in the step, and drawn there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.name = f"step {self.global_step}"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + named(self.name)), batch[1])


class DrawsBefore(Net):
    """Once in an epoch it is made after other numbers were drawn."""

    def on_train_epoch_start(self) -> None:
        noise.cache_clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.dropout(batch[0], 0.3)
        return F.cross_entropy(self(x + noise(8)), batch[1])


@functools.lru_cache(maxsize=2)
def one_of_two(width: int) -> Tensor:
    RUN.append("one_of_two")
    return torch.randn(width)


class HoldsTooFew(Net):
    """Three take turns in a cache for two."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = [one_of_two(width) for width in (8, 16, 24)]
        x = self(batch[0] + drawn[0])
        return F.cross_entropy(x, batch[1]) * (1 + 0.01 * drawn[1].mean() + 0.01 * drawn[2].mean())


@functools.cache
def pair() -> tuple[float, float]:
    RUN.append("pair")
    return PAIRS[len([name for name in RUN if name == "pair"]) - 1]


PAIRS: list[Any] = [(1, 2), (1.0, 2.0)]


class OfOtherTypes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == STEPS // 2:
            pair.cache_clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        whole = torch.full((3,), pair()[0]).dtype == torch.int64
        return F.cross_entropy(self(batch[0]), batch[1]) * (1.0 if whole else 0.5)


def forget_all() -> None:
    RUN.clear()
    for each in (
        noise,
        is_on,
        settings,
        tables,
        history,
        of_width,
        HasItsOwn.offset,
        named,
        one_of_two,
        pair,
    ):
        each.cache_clear()


def compared(kind: type[Net], **options: Any) -> Any:
    """The callback, after two trainings that are alike; what ran in both is in ``RUN`` of the second."""
    callback, ran, states, models = hot(scope="step", **options), [], [], []
    for callbacks in ([], [callback]):
        forget_all()
        models.append(seeded(kind))
        fit(models[-1], callbacks)
        ran.append(tuple(RUN))
        states.append(torch.get_rng_state().tolist())
    assert_same(*models)
    assert ran[0] == ran[1]
    assert states[0] == states[1]
    return callback


def test_no_graph_ends_at_one() -> None:
    callback = compared(Asks)
    assert_proven(callback.report)
    assert callback.report.graph_breaks == 0
    assert [region.graphs for region in callback.report.regions if region.name == "training_step"] == [1]
    assert sorted(RUN) == ["is_on", "noise", "settings", "tables"]


@pytest.mark.slow
def test_so_under_inductor() -> None:
    callback = compared(Asks, backend="inductor", store=None)
    assert_proven(callback.report)
    assert callback.report.graph_breaks == 0


def test_what_is_made_anew_is_used() -> None:
    callback = compared(Forgets)
    assert_proven(callback.report)
    assert RUN.count("noise") == 2
    assert callback.report.recompiles == 1


def test_before_any_step_has_called_them() -> None:
    assert_proven(compared(Asks, threshold=0).report)


@pytest.mark.parametrize("kind", [AsksForAnotherEachTime, DrawsBefore, HoldsTooFew, OfOtherTypes])
def test_what_a_cache_does_not_hold_is_made_at_its_place(kind: type[Net]) -> None:
    compared(kind, on_error="eager")


def test_nothing_of_a_cache_is_kept() -> None:
    class Breaks(Asks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            time.time()
            torch._dynamo.graph_break()
            return loss * 1.0

    forget_all()
    fit(model := seeded(Breaks), [callback := hot(scope="step")])
    assert_proven(callback.report)
    held = [weakref.ref(noise(8)), weakref.ref(tables(8)[0])]
    noise.cache_clear()
    tables.cache_clear()
    del model, callback
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("kind", [Falls, HasItsOwn])
def test_what_may_not_be_relied_on_is_called_at_its_place(kind: type[Net]) -> None:
    assert_proven(compared(kind).report)


def test_what_python_changes_in_each_step_is_not_kept() -> None:
    compared(Remembers)


def test_of_another_answer_other_code_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Switches(Asks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step % 16 == 0:
                is_on.cache_clear()
                monkeypatch.setitem(ON, "noise", self.global_step != 16)

    assert_proven(compared(Switches).report)
    assert RUN.count("is_on") == 3
