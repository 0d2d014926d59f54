"""What a step costs before anything is hot: little of this callback's own Python, and none of it is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_hotcompile import HotCompile
from lightning_hotcompile.watch.clock import MAX_PENDING, StepClock
from tests.hot import hot
from tests.models import Net, fit, loader, seeded

_MOST_CALLS = 110
_MOST_CALLS_AT_FIRST = 500


class Counted(HotCompile):
    """Counts the Python functions that are called in its hooks, step by step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[int] = []

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self.calls[-1] += event == "call"

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append(0)
        sys.setprofile(self._count)
        super().on_train_batch_start(*args)
        sys.setprofile(None)

    def on_before_optimizer_step(self, *args: Any) -> None:
        sys.setprofile(self._count)
        super().on_before_optimizer_step(*args)
        sys.setprofile(None)

    def on_train_batch_end(self, *args: Any) -> None:
        sys.setprofile(self._count)
        super().on_train_batch_end(*args)
        sys.setprofile(None)


def test_few_functions_are_called_in_a_step_that_is_observed() -> None:
    callback = Counted(threshold=1000, cost_gate=False, store=None)
    fit(seeded(Net), [callback], train=loader(8 * 64), max_epochs=1)
    assert (callback.report.phase, callback.report.steps) == ("observing", 64)
    assert median(callback.calls[16:]) < _MOST_CALLS  # the heap and the fused optimizer are settled by then


def test_few_functions_are_called_in_the_first_steps(tmp_path: Path) -> None:
    """What needs no step is looked at before them: the machine, with a dozen files to read."""
    for _ in range(2):  # the first of a process loads code
        callback = Counted(threshold=1000, store=tmp_path)
        fit(seeded(Net), [callback], train=loader(8 * 6), max_epochs=1)
    assert len(callback.calls) == 6
    assert max(callback.calls) < _MOST_CALLS_AT_FIRST, callback.calls


class Asks(pl.Callback):
    """Asks for the report after each step."""

    def __init__(self, callback: HotCompile) -> None:
        self._callback = callback
        self.steps: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(sum(phase.steps for phase in self._callback.report.phases))


def test_steps_are_entered_together_while_nothing_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[int] = []
    drain = StepClock.drain

    def counted(clock: StepClock, **options: Any) -> Any:
        drained.append(len(steps := drain(clock, **options)))
        return steps

    monkeypatch.setattr(StepClock, "drain", counted)
    callback = hot(threshold=1000, cost_gate=False, store=None)
    fit(seeded(Net), [callback], train=loader(8 * 3 * MAX_PENDING), max_epochs=1)
    assert callback.report.steps == sum(drained) == 3 * MAX_PENDING  # none was given up
    assert len(drained) < MAX_PENDING
    assert len(callback.report.samples) == 3 * MAX_PENDING


def test_the_report_holds_all_steps_at_any_time() -> None:
    callback = hot(threshold=1000, cost_gate=False, store=None)
    asks = Asks(callback)
    fit(seeded(Net), [callback, asks], train=loader(8 * 40), max_epochs=1)
    assert asks.steps == list(range(1, 41))
