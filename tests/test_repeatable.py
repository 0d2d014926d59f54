"""With options that leave nothing to the clock two trainings with one seed are equal to the last bit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hotcompile import HotCompile
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.run.reporting import REPEATABLE
from lightning_hotcompile.swap.gate import Lane
from tests.hot import STEP, hot
from tests.models import Net, fit, loader, seeded, weights

STEPS = 60
OPTIONS: dict[str, Any] = {
    name: {"False": False, "0": 0.0}[value] for name, value in re.findall(r"(\w+)=(\w+)", REPEATABLE)
}


class Slowed(pl.Callback):
    """Some steps take longer, and what is compiled is written down.

    Args:
        callback: the one whose steps these are.
        lane: of the steps that take longer.
    """

    def __init__(self, callback: HotCompile, lane: Lane) -> None:
        self.lanes: list[Lane] = []
        self._callback = callback
        self._lane = lane

    def on_train_batch_start(self, *_: Any) -> None:
        session = self._callback._runs["train"].session
        self.lanes.append(session._calm.lane)
        if session._calm.lane is self._lane:
            time.sleep(0.02)


def lanes(slow: Lane, **options: Any) -> list[Lane]:
    callback = hot(**STEP, threshold=3, **options)
    watch = Slowed(callback, slow)
    fit(seeded(Net), [callback, watch], train=loader(8 * STEPS), max_steps=STEPS)
    return watch.lanes


def test_which_steps_run_compiled_does_not_depend_on_their_times() -> None:
    slow_code, slow_eager = (lanes(lane, **OPTIONS) for lane in (Lane.REUSE, Lane.EAGER))
    assert len(slow_code) == STEPS
    assert {Lane.EAGER, Lane.REUSE} <= set(slow_code)
    assert slow_code == slow_eager


def test_by_default_it_does() -> None:
    """What the test above would miss if times did not count."""
    slow_code, slow_eager = (lanes(lane, min_speedup=1.02) for lane in (Lane.REUSE, Lane.EAGER))
    assert slow_code[-1] is Lane.EAGER
    assert slow_eager[-1] is Lane.REUSE


@pytest.mark.parametrize("name", OPTIONS)
def test_each_of_these_options_is_needed(name: str) -> None:
    assert HotCompileConfig(**OPTIONS).is_repeatable
    others = {other: value for other, value in OPTIONS.items() if other != name}
    assert not HotCompileConfig(**others).is_repeatable


def test_what_else_the_clock_decides() -> None:
    """Inductor times kernels to choose among them; fused ones are tried with ``compile_optimizer="auto"``."""
    assert not HotCompileConfig(**OPTIONS, mode="max-autotune").is_repeatable
    assert not HotCompileConfig(**OPTIONS, options={"max_autotune": True}).is_repeatable
    assert HotCompileConfig(**OPTIONS, options={"max_autotune": False}).is_repeatable
    tried = {**OPTIONS, "fused_optimizer": True}
    assert HotCompileConfig(**tried, compile_optimizer=False).is_repeatable


class Dropping(Net):
    """With random numbers, and operations whose compiled code rounds otherwise."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.more = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2))
        self.back = nn.Linear(64, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return super().training_step((x + self.back(self.more(x)), y), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.slow
def test_two_trainings_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    """The second one finds the code of the first. Both are other than eager, or this would say nothing."""
    plain = seeded(Dropping)
    fit(plain, [], train=loader(8 * STEPS), max_steps=STEPS)
    found = []
    for _ in range(2):
        callback = HotCompile(threshold=3, on_error="raise", store=str(tmp_path), **OPTIONS)
        model = seeded(Dropping)
        fit(model, [callback], train=loader(8 * STEPS), max_steps=STEPS)
        assert callback.report.phase == "steady"
        found.append(weights(model))
    first, second = found
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], value) for name, value in weights(plain).items())
    for name, value in weights(plain).items():
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-4)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(
    ("options", "deterministic", "is_told"),
    [
        ({"min_speedup": 0.01}, True, True),
        ({"min_speedup": 0.01}, False, False),
        ({}, True, False),
        ({"cost_gate": True, "min_speedup": 1.02}, True, False),  # nothing was compiled
    ],
)
def test_who_asks_for_determinism_is_told(
    options: dict[str, Any], deterministic: bool, is_told: bool
) -> None:
    callback = hot(**STEP, **options)
    fit(seeded(Net), [callback], train=loader(8 * 30), max_steps=30, deterministic=deterministic)
    notes = [note for note in callback.report.notes if REPEATABLE in note]
    assert len(notes) == is_told
