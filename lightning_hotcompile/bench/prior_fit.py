"""Fits what a scope gains to the rows of the suite ``scopes``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hotcompile.bench.regret import geometric_mean
from lightning_hotcompile.plan.prior import Gain, OpStatistics

LEAST_CASES = 6
"""Of a scope that is fitted: four numbers are."""

Numbers = NDArray[np.float64]


def fitted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What each scope gains, as the plain numbers of a :class:`~lightning_hotcompile.plan.prior.Gain`.

    Args:
        rows: with ``plan``, ``eager_ms``, ``speedup``, ``ops`` and ``elements``; those without a speed-up
            are left out.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("speedup"):
            found.setdefault(row["plan"], []).append(row)
    return {plan: _gain(cases) for plan, cases in found.items() if len(cases) >= LEAST_CASES}


def _gain(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    ops = [OpStatistics.of(row["ops"], row["elements"]) for row in rows]
    ms = np.array([row["eager_ms"] for row in rows])
    fusible = np.array([o.fusible for o in ops]) / ms
    batch_norm = 1e-6 * np.array([o.batch_norm for o in ops]) / ms
    known = np.stack([np.ones(len(rows)), -1 / ms, fusible, batch_norm], axis=1)
    speedups = np.array([row["speedup"] for row in rows])
    share, call_ms, op_ms, batch_norm_ms = (float(n) for n in not_negative(known, 1 - 1 / speedups))
    gain = Gain(
        share=share,
        call_ms=call_ms,
        op_ms=op_ms,
        batch_norm_ms=batch_norm_ms,
        usual_fusible=float(fusible.mean()),
        usual_batch_norm=float(batch_norm.mean()),
        typical=geometric_mean(speedups.tolist()) or 1.0,
        least=float(speedups.min()),
        most=float(speedups.max()),
        rms=_error_unseen(known, speedups),
        cases=len(rows),
    )
    return {name: value if name == "cases" else round(value, 6) for name, value in vars(gain).items()}


def _error_unseen(known: Numbers, speedups: Numbers) -> float:
    """Root mean square of the logarithm's error, each case predicted from all others."""
    errors = []
    for i in range(len(speedups)):
        others = np.arange(len(speedups)) != i
        saved = float(known[i] @ not_negative(known[others], 1 - 1 / speedups[others]))
        most = float(speedups[others].max())
        errors.append(math.log(speedups[i]) + math.log(max(1 - saved, 1 / most)))
    return math.sqrt(math.fsum(e * e for e in errors) / len(errors))


def not_negative(known: Numbers, wanted: Numbers) -> Numbers:
    """Least squares with coefficients of 0 or more: the best fit of all choices of those that are not 0."""
    columns = known.shape[1]
    best, least = np.zeros(columns), float(np.sum(wanted**2))
    for chosen in itertools.product([False, True], repeat=columns):
        if not any(chosen):
            continue
        solved = np.linalg.lstsq(known[:, chosen], wanted, rcond=None)[0]
        error = float(np.sum((known[:, chosen] @ solved - wanted) ** 2))
        if (solved >= 0).all() and error < least:
            best, least = np.zeros(columns), error
            best[list(chosen)] = solved
    return best
