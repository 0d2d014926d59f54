"""How fast the machine is at the moment: a fixed piece of work, timed again and again beside a training.

On a machine that others use too, the same training takes half as long again some minutes later. What it took
over what a fixed piece of work took at the same time is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

REFERENCE_S = 0.002
"""Seconds that the piece of work takes on the machine in whose seconds times are given."""

EVERY_S = 0.25
"""Between two samples."""

_SMOOTHED = 5
"""Samples of which the middle one counts: a single one may have been interrupted."""


class Pace:
    """Samples of the machine's pace, by the number of the step after which they were taken."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(256, 256, generator=generator) / 16
        self._input = torch.randn(64, 256, generator=generator)
        self._samples: list[tuple[int, float]] = []
        self._last = 0.0
        self._work()  # for the first time it takes longer

    def sample(self, step: int, *, now: bool = False) -> None:
        """Time the piece of work, if the last time was long enough ago or ``now``."""
        start = time.perf_counter()
        if not now and start - self._last < EVERY_S:
            return
        self._work()
        self._last = time.perf_counter()
        self._samples.append((step, self._last - start))

    def _work(self) -> None:
        value = self._input
        with torch.no_grad():
            for _ in range(12):
                value = torch.nn.functional.gelu(value @ self._weight)
                value = (value - value.mean(-1, keepdim=True)) * torch.rsqrt(
                    value.var(-1, keepdim=True) + 1e-5
                )

    def at(self, steps: Sequence[int]) -> list[float]:
        """Seconds of the piece of work at each of these steps.

        Raises:
            ValueError: there is no sample.
        """
        if not self._samples:
            raise ValueError("no sample of the pace was taken.")
        seconds = [found for _, found in self._samples]
        reach = _SMOOTHED // 2
        smooth = [median(seconds[max(0, i - reach) : i + reach + 1]) for i in range(len(seconds))]
        return list(map(float, np.interp(steps, [step for step, _ in self._samples], smooth)))
