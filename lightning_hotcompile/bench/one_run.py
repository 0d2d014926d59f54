"""One training of one case by one arm, in this process; prints one line of JSON.

    python -m lightning_hotcompile.bench.one_run CASE ARM STEPS [--marks N ...] [--threads N] [--options JSON]

Where the compiler keeps its files is up to the environment.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch._dynamo  # any optimizer imports it in its first step; processes are forked after that
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_hotcompile.bench.arms import ARMS, EAGER, HOTCOMPILE
from lightning_hotcompile.bench.cases import CASES, DIFFERENT_BATCHES, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.callback import HotCompile

WARM_UP = 2
"""Eager steps before all: threads that are started and types that Lightning meets for the first time are to
be found by no arm, or by each."""

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
        marks: numbers of steps after which time and weights are written down; that is not timed.
    """

    def __init__(self, marks: Collection[int]) -> None:
        self.seconds: list[float] = []
        self.marks: dict[int, dict[str, float]] = {}
        self._wanted = frozenset(marks)
        self._initial: list[Tensor] = []
        self.started = self._last = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._initial = [p.detach().clone() for p in pl_module.parameters()]
        self.started = self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """One batch is over."""
        self.seconds.append(time.perf_counter() - self._last)
        if len(self.seconds) in self._wanted:
            self.marks[len(self.seconds)] = self._mark(list(pl_module.parameters()))
        self._last = time.perf_counter()

    def _mark(self, weights: list[Tensor]) -> dict[str, float]:
        return {
            "elapsed_s": sum(self.seconds),
            "steady_s": steady_s(self.seconds),
            "weights": _norm(weights),
            "moved": _norm([w - before for w, before in zip(weights, self._initial, strict=True)]),
        }


def _norm(tensors: list[Tensor]) -> float:
    return float(sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5)


def run(
    case: Case, arm: str, steps: int, marks: Sequence[int] = (), options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train once and tell what it took; ``marks`` holds the end and those of the marks that were reached."""
    _train(case, case.model(), WARM_UP, [])
    model, callbacks = ARMS[arm](case, options or {})
    watch = Stopwatch({*marks, steps})
    start = time.perf_counter()
    _train(case, model, steps, [*callbacks, watch])
    wall_s = time.perf_counter() - start
    hot = next((c for c in callbacks if isinstance(c, HotCompile)), None)
    second_half = watch.seconds[len(watch.seconds) // 2 :]
    return {
        "steps": steps,
        "wall_s": wall_s,
        "worst_step_s": max(watch.seconds),
        "mean_s": statistics.fmean(second_half),
        "before_s": watch.started - start,
        "marks": watch.marks,
        "phase": hot.report.phase if hot else "",
        "reason": (hot.report.reason or hot.report.decision) if hot else "",
        "eager_beside_s": None if arm in (EAGER, HOTCOMPILE) else _eager_step_s(case, steps),
    }


def _eager_step_s(case: Case, steps: int) -> float:
    """What a step takes in an eager training of a new model, as the machine is now."""
    watch = Stopwatch({steps})
    _train(case, case.model(), steps, [watch])
    return watch.marks[steps]["steady_s"]


def _train(case: Case, model: LightningModule, steps: int, callbacks: list[Callback]) -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(2)
    trainer.fit(model, torch.utils.data.DataLoader(case.batches(), batch_size=None))


def main() -> None:
    """One arm of one case in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("arm", choices=sorted(ARMS)),
        lambda p: p.add_argument("steps", type=int),
        lambda p: p.add_argument("--marks", type=int, nargs="*", default=[]),
    )
    print(json.dumps(run(CASES[found.case], found.arm, found.steps, found.marks, found.options)))


if __name__ == "__main__":
    main()
