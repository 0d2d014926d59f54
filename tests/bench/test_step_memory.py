"""The most memory that a step holds at a time."""

from __future__ import annotations

import pytest
import torch

from lightning_hotcompile.bench.measure import measure
from lightning_hotcompile.bench.measurement import Request
from lightning_hotcompile.bench.step_memory import peak_of_step_mb

MB = 2**18
"""Elements of 4 bytes in 2**20 bytes."""


def test_what_is_held_at_the_same_time_adds_up() -> None:
    def step() -> None:
        first, second = torch.empty(8 * MB), torch.empty(4 * MB)
        del first, second

    assert peak_of_step_mb(step) == pytest.approx(12, abs=0.1)


def test_what_was_freed_before_does_not() -> None:
    def step() -> None:
        for _ in range(5):
            torch.empty(4 * MB)

    assert peak_of_step_mb(step) == pytest.approx(4, abs=0.1)


def test_what_was_there_before_is_not_counted() -> None:
    weight = torch.zeros(16 * MB)

    def step() -> None:
        weight.add_(1)

    assert peak_of_step_mb(step) < 0.1


def test_each_arm_of_a_row_has_its_own() -> None:
    sizes = {"batch_size": 256, "width": 64}
    request = Request(workload="elementwise", sizes=sizes, rounds=10, warmup=1, backend="aot_eager")
    arms = measure(request).arms
    peaks = {name: arm.peak_memory_mb for name, arm in arms.items()}
    assert set(peaks) >= {"eager", "compiled"}
    assert all(peak is not None and peak > 256 * 64 * 4 / 2**20 for peak in peaks.values())


def test_what_an_earlier_step_has_left_is_not_counted() -> None:
    kept: list[torch.Tensor] = []
    assert peak_of_step_mb(lambda: kept.append(torch.empty(8 * MB))) == pytest.approx(8, abs=0.1)
    assert peak_of_step_mb(lambda: torch.empty(MB).zero_()) == pytest.approx(1, abs=0.1)


def test_what_is_freed_of_an_earlier_step_makes_no_room() -> None:
    kept: list[torch.Tensor] = []
    peak_of_step_mb(lambda: kept.append(torch.empty(8 * MB)))

    def step() -> None:
        kept.clear()
        kept.append(torch.empty(2 * MB))

    assert peak_of_step_mb(step) == pytest.approx(2, abs=0.1)
