"""Gradient accumulation: optimizer steps of several batches, which may be of several kinds."""

from __future__ import annotations

import time

import pytest

from lightning_hotcompile.receipt.report import Report
from tests.hot import assert_same, hot
from tests.models import Batches, Small, fit, seeded


class Slow(Small):
    """Its batches take long enough for their times to say how many they are of, on a busy machine too."""

    def on_after_backward(self) -> None:
        time.sleep(0.01)


def trained(sizes: list[int], accumulate: int, kind: type[Small] = Small, **options: object) -> Report:
    """The report of a training with batches of these sizes in each epoch; its weights are eager's."""
    plain, model = seeded(kind), seeded(kind)
    callback = hot(scope="step", **options)
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": 200 // len(sizes)}
    fit(plain, train=Batches(sizes), **settings)
    fit(model, [callback], train=Batches(sizes), **settings)
    assert_same(plain, model)
    return callback.report


@pytest.mark.parametrize(
    ("sizes", "accumulate"),
    [([8, 8, 8, 4], 4), ([8, 4], 2), ([8] * 11 + [4], 4), ([4, 8, 8, 8], 4)],
    ids=["the last one is short", "two in turns", "in one of three", "the first one is short"],
)
def test_micro_steps_of_several_kinds_are_compared_each_with_its_own(
    sizes: list[int], accumulate: int
) -> None:
    report = trained(sizes, accumulate, dynamic=False)
    assert report.phase == "steady", report.reason
    assert report.speedup is not None
    assert report.speedup.n >= 10


def test_none_of_them_may_compile_for_ever() -> None:
    report = trained([8, 8, 8, 4], 4, dynamic=False)
    first, *others = [e for e in report.events if e["kind"] == "compiled"]
    assert first["step"] <= 16
    assert all(e["step"] <= 40 for e in others)


def test_step_times_are_those_of_a_batch() -> None:
    """Before anything is compared they are of single batches, and in the table of phases always."""
    report = trained([8] * 8, 4, Slow)
    assert report.phase == "steady", report.reason
    assert report.compiled_ms is not None
    steady = next(phase for phase in report.phases if phase.name == "steady")
    assert steady.median_ms is not None
    assert report.compiled_ms.median < 3 * steady.median_ms  # of an optimizer step it would be four


def test_an_epoch_that_ends_in_the_middle_of_a_unit() -> None:
    report = trained([8] * 10, 4)
    assert report.phase == "steady", report.reason
    assert report.speedup is not None
    assert report.speedup.n >= 10
