"""One training of one case by one arm, in this process; prints one line of JSON.

    python -m lightning_hotcompile.bench.one_run CASE ARM STEPS [--marks N ...] [--threads N] [--options JSON]

Where the compiler keeps its files is up to the environment.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

# Any optimizer imports it in its first step; processes are forked after that.
import torch._dynamo  # noqa: F401
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_hotcompile.bench.arms import TRAININGS
from lightning_hotcompile.bench.cases import CASES, DIFFERENT_BATCHES, Batches, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.bench.pace import REFERENCE_S, Pace
from lightning_hotcompile.bench.quiet import train
from lightning_hotcompile.callback import HotCompile

WARM_UP = 2
"""Eager steps before all: threads that are started and types that Lightning meets for the first time are to
be found by no arm, or by each."""

SAMPLES_AT_ONCE = 3
"""Of the machine's pace, before the first step and after the last one."""

LEAST_CYCLES = 3
"""With fewer times of each batch than this there is no median for each."""


def steady_s(seconds: Sequence[float], cycle: int = DIFFERENT_BATCHES) -> float:
    """Seconds of a step once nothing is compiled any more: from the second half of the steps.

    Batches come in a cycle, and some are larger than others: the median over the times of each batch,
    then the mean over the batches. Slow steps that happen now and then are left out.
    """
    second_half = seconds[len(seconds) // 2 :]
    if len(second_half) < LEAST_CYCLES * cycle:
        return statistics.median(second_half)
    return statistics.fmean(statistics.median(second_half[i::cycle]) for i in range(cycle))


class Stopwatch(Callback):
    """The wall time between the ends of two batches; the first one from the start of training.

    Args:
        marks: numbers of steps after which the weights are looked at; that is not timed.
        is_alone: whether the training has the machine for itself; only then its pace is looked at.
        waited_s: seconds for which data was waited for until now; a slow machine waits no longer.
    """

    def __init__(
        self,
        marks: Collection[int],
        is_alone: Callable[[], bool] = lambda: True,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.seconds: list[float] = []
        """Of each step, by the clock."""

        self._waited_s = waited_s
        self._waits = [0.0]
        """What was waited until the first step began, and until each one ended."""

        self._wanted = frozenset(marks)
        self._is_alone = is_alone
        self._pace = Pace()
        self._initial: list[Tensor] = []
        self._weights: dict[int, dict[str, float]] = {}
        self._looking_s = 0.0
        self.started = self._last = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._initial = [p.detach().clone() for p in pl_module.parameters()]
        self.started = time.perf_counter()
        self._waits = [self._waited_s()]
        for _ in range(SAMPLES_AT_ONCE):
            self._pace.sample(0, now=True)
        self._last = time.perf_counter()
        self._looking_s = self._last - self.started

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """One batch is over."""
        ended = time.perf_counter()
        self.seconds.append(ended - self._last)
        self._waits.append(self._waited_s())
        steps = len(self.seconds)
        if steps in self._wanted:
            weights: list[Tensor] = list(pl_module.parameters())
            moved = [w - before for w, before in zip(weights, self._initial, strict=True)]
            self._weights[steps] = {"weights": _norm(weights), "moved": _norm(moved)}
        if self._is_alone():
            self._pace.sample(steps)
        self._last = time.perf_counter()
        self._looking_s += self._last - ended

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last samples."""
        start = time.perf_counter()
        for _ in range(SAMPLES_AT_ONCE):
            self._pace.sample(len(self.seconds), now=True)
        self._looking_s += time.perf_counter() - start

    def times(self, began: float, ended: float) -> dict[str, Any]:
        """All times, in seconds of the reference machine but for the worst step and ``clock_s``.

        Args:
            began: when ``Trainer.fit`` was called, by the same clock.
            ended: when it returned.
        """
        scales = [REFERENCE_S / pace for pace in self._pace.at(range(len(self.seconds) + 1))]
        waits = [after - before for before, after in pairwise(self._waits)]
        each = zip(self.seconds, waits, scales[1:], strict=True)
        steps = [waited + (s - waited) * scale for s, waited, scale in each]
        clock_s = ended - began - self._looking_s
        waited_before = self._waits[0]
        working_s = max(0.0, clock_s - sum(self.seconds) - waited_before)
        return {
            "wall_s": waited_before + working_s * scales[0] + sum(steps),
            "clock_s": clock_s,
            "worst_step_s": max(self.seconds),
            "mean_s": statistics.fmean(steps[len(steps) // 2 :]),
            "before_s": waited_before + (self.started - began - waited_before) * scales[0],
            "marks": {
                n: {"elapsed_s": sum(steps[:n]), "steady_s": steady_s(steps[:n]), **found}
                for n, found in self._weights.items()
            },
        }


def _norm(tensors: list[Tensor]) -> float:
    return float(sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5)


def run(
    case: Case, arm: str, steps: int, marks: Sequence[int] = (), options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train once and tell what it took; ``marks`` holds the end and those of the marks that were reached."""
    _train(case.batches(), case.model(), WARM_UP, [])
    model, callbacks = TRAININGS[arm](case, options or {})
    hot = next((c for c in callbacks if isinstance(c, HotCompile)), None)
    batches = case.batches()
    watch = Stopwatch(
        {*marks, steps},
        is_alone=lambda: hot is None or hot.phase != "prewarming",
        waited_s=lambda: batches.waited_s,
    )
    began = time.perf_counter()
    _train(batches, model, steps, [*callbacks, watch])
    return {
        "steps": steps,
        **watch.times(began, time.perf_counter()),
        "phase": hot.report.phase if hot else "",
        "reason": (hot.report.reason or hot.report.decision) if hot else "",
    }


def _train(batches: Batches, model: LightningModule, steps: int, callbacks: list[Callback]) -> None:
    train(model, batches, callbacks, max_steps=-1, max_epochs=1, limit_train_batches=steps)


def main() -> None:
    """One arm of one case in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("arm", choices=sorted(TRAININGS)),
        lambda p: p.add_argument("steps", type=int),
        lambda p: p.add_argument("--marks", type=int, nargs="*", default=[]),
    )
    print(json.dumps(run(CASES[found.case], found.arm, found.steps, found.marks, found.options)))


if __name__ == "__main__":
    main()
