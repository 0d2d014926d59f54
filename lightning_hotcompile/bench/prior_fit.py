"""Fits what a scope gains to the rows of the suite ``scopes``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        rows: with ``case``, ``plan``, ``eager_ms``, ``speedup``, ``ops``, ``elements`` and ``seconds``; those
            without a speed-up are left out.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("speedup"):
            found.setdefault(row["plan"], []).append(row)
    return {plan: _gain(cases) for plan, cases in found.items() if _different(cases) >= LEAST_CASES}


def _different(rows: Sequence[Mapping[str, Any]]) -> int:
    return len({row.get("case", i) for i, row in enumerate(rows)})


@dataclass(frozen=True)
class _Case:
    name: object
    step_s: float
    speedup: float
    ops: OpStatistics


def _gain(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    cases = [
        _Case(
            row.get("case", i),
            1e-3 * row["eager_ms"],
            row["speedup"],
            OpStatistics.of(row["ops"], row.get("elements") or {}, row.get("seconds")),
        )
        for i, row in enumerate(rows)
    ]
    timed = all(case.ops.light_s is not None for case in cases)
    choices = [c for c in _CHOICES if timed or "light" not in c]
    errors = {choice: _error_unseen(cases, choice) for choice in choices}
    best = min(errors, key=errors.__getitem__)
    gain = replace(_fit(cases, best), rms=errors[best])
    return {name: value if name == "cases" else round(value, 6) for name, value in vars(gain).items()}


_CHOICES = [
    frozenset(each) for each in (["density"], ["density", "batch_norm"], ["light"], ["light", "batch_norm"])
]
"""What the fit may know of a case beside its time: the best for cases that it has not seen is taken."""


def _fit(cases: Sequence[_Case], choice: frozenset[str]) -> Gain:
    ms = np.array([1e3 * case.step_s for case in cases])
    fusible = np.array([case.ops.fusible for case in cases]) / ms
    elements = 1e-6 * np.array([case.ops.batch_norm for case in cases]) / ms
    light = np.array([case.ops.light_share(case.step_s) or 0.0 for case in cases])
    speedups = [case.speedup for case in cases]
    columns = [
        np.ones(len(cases)),
        -1 / ms,
        np.sqrt(fusible) * ("density" in choice),
        elements * ("batch_norm" in choice),
        light * ("light" in choice),
    ]
    solved = not_negative(np.stack(columns, axis=1), 1 - 1 / np.array(speedups))
    share, call_ms, density, batch_norm_ms, of_light = map(float, solved)
    return Gain(
        share=share,
        call_ms=call_ms,
        density=density,
        batch_norm_ms=batch_norm_ms,
        light=of_light,
        usual_fusible=float(fusible.mean()),
        usual_batch_norm=float(elements.mean()),
        usual_light=float(light.mean()) if "light" in choice else 0.0,
        typical=geometric_mean(speedups) or 1.0,
        least=min(speedups),
        most=max(speedups),
        rms=math.nan,
        cases=len(cases),
    )


def _error_unseen(cases: Sequence[_Case], choice: frozenset[str]) -> float:
    """Root mean square of the logarithm's error, each case predicted from all others, on any machine."""
    errors = []
    for case in cases:
        others = _fit([other for other in cases if other.name != case.name], choice)
        errors.append(math.log(case.speedup / others.speedup(case.step_s, case.ops)))
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
