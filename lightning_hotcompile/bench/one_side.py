"""One case, trained without the callback, or with it until it has decided: the median of the steps then.

    python -m lightning_hotcompile.bench.one_side CASE [--callback] [--steps N] [--threads N] [--options JSON]

It prints one line of JSON. What a process that has the callback gains over one that never had it is more
than what its compiled code gains: freed memory that stays is a gain of the eager steps in that process too.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from statistics import median
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_hotcompile.bench.cases import CASES, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.bench.one_steady import MOST_STEPS, TRAINING, Muted
from lightning_hotcompile.bench.quiet import train

LEFT_OUT = 20
"""First steps after the callback has decided, and of a training without it."""


class TimedSteps(Callback):
    """Ends the training once enough steps are timed.

    Args:
        hot: the callback, whose decision is waited for.
        steps: how many are timed.
    """

    def __init__(self, hot: Muted | None, steps: int) -> None:
        self._hot = hot
        self._most = steps + LEFT_OUT
        self._starts: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Before the callback's own hook, which is part of the step: this one comes first."""
        if self._hot is not None and self._hot.is_undecided:
            self._starts = []
            trainer.should_stop = trainer.global_step > MOST_STEPS
            return
        self._starts.append(time.perf_counter())
        trainer.should_stop = len(self._starts) > self._most

    @property
    def step_s(self) -> float | None:
        """From the start of a step to that of the next; None if the callback has not decided."""
        times = [after - before for before, after in pairwise(self._starts)][LEFT_OUT:]
        return median(times) if times else None


def run(case: Case, steps: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """The median step in milliseconds, and with the callback what it has decided.

    Args:
        case: what is trained.
        steps: how many are timed.
        options: of the callback; None trains without it.

    Raises:
        RuntimeError: the callback had not decided after :data:`.one_steady.MOST_STEPS` steps.
    """
    hot = None if options is None else Muted(**options)
    timed = TimedSteps(hot, steps)
    train(case.model(), case.batches(), [timed] if hot is None else [timed, hot], max_steps=TRAINING)
    if timed.step_s is None:
        raise RuntimeError(f"the callback had not decided after {MOST_STEPS:,} steps")
    said = {} if hot is None else {name: getattr(hot.report, name) for name in ("phase", "reason", "scope")}
    return {"step_ms": 1e3 * timed.step_s, **said}


def main() -> None:
    """One case in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("--callback", action="store_true"),
        lambda p: p.add_argument("--steps", type=int, default=200),
    )
    print(json.dumps(run(CASES[found.case], found.steps, found.options if found.callback else None)))


if __name__ == "__main__":
    main()
