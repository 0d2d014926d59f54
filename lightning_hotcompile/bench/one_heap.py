"""One case, trained eagerly: some steps, then glibc keeps what is freed (or not), then as many steps more.

    python -m lightning_hotcompile.bench.one_heap CASE [--keep] [--steps N] [--threads N]

It prints one line of JSON.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning.pytorch import Callback

from lightning_hotcompile.bench.cases import CASES, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.bench.quiet import train
from lightning_hotcompile.run.heap_watch import LEFT_OUT_AFTER_CHANGE
from lightning_hotcompile.swap.process import heap

FIRST_LEFT_OUT = 20
"""First steps of each half: caches fill, and memory is touched for the first time."""


@dataclass
class Half:
    """Steps before or after the change."""

    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)


class TwoHalves(Callback):
    """Times each step and counts its page faults.

    Args:
        steps: of each half.
        keep: whether glibc is told to keep what is freed, between the halves.
    """

    def __init__(self, steps: int, *, keep: bool) -> None:
        self.halves = Half(), Half()
        self.kept = not keep
        """Whether all was done that was to be done."""

        self._steps = steps
        self._keep = keep
        self._count = 0
        self._start, self._faults = 0.0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock, after the change."""
        if self._count == self._steps and self._keep:
            self.kept = heap.why_not_kept() is None and heap.keep_freed_memory()
        self._faults = heap.page_faults()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        seconds, faults = time.perf_counter() - self._start, heap.page_faults() - self._faults
        half = self.halves[self._count >= self._steps]
        half.seconds.append(seconds)
        half.faults.append(faults)
        self._count += 1


def run(case: Case, steps: int, *, keep: bool) -> dict[str, Any]:
    """Medians of both halves: milliseconds and page faults of a step."""
    halves = TwoHalves(steps, keep=keep)
    train(case.model(), case.batches(), [halves], max_steps=-1, max_epochs=1, limit_train_batches=2 * steps)
    if not halves.kept:
        raise RuntimeError(f"glibc was not told: {heap.why_not_kept() or 'another allocator is in use'}")
    left_out = min(FIRST_LEFT_OUT, steps // 2) + LEFT_OUT_AFTER_CHANGE
    before, after = halves.halves
    return {
        "before_ms": 1e3 * median(before.seconds[left_out:]),
        "after_ms": 1e3 * median(after.seconds[left_out:]),
        "before_faults": round(median(before.faults[left_out:])),
        "after_faults": round(median(after.faults[left_out:])),
    }


def main() -> None:
    """One case in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("--keep", action="store_true"),
        lambda p: p.add_argument("--steps", type=int, default=150),
    )
    print(json.dumps(run(CASES[found.case], found.steps, keep=found.keep)))


if __name__ == "__main__":
    main()
