"""What scopes have gained on other models, by the time of their eager step: a line for each scope.

    python recipes/benchmark.py suite=scopes

measures the table and writes ``prior.json`` beside it; the one in this folder is such a file. The time of a
step says more about the gain than its operations do: where a step is short, the cost of a call of compiled
code eats up what it saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import linear_regression
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Line:
    """``log(speed-up) = intercept + slope * log(step in ms)``, between the shortest and longest step seen.

    ``rms`` is the typical error of the logarithm for a case that the line has not seen.
    """

    intercept: float
    slope: float
    from_ms: float
    to_ms: float
    rms: float
    cases: int

    def speedup(self, step_s: float | None) -> float:
        """Expected eager time / compiled time; without a time, that of a step in the middle."""
        middle = math.sqrt(self.from_ms * self.to_ms)
        ms = middle if step_s is None else min(max(1e3 * step_s, self.from_ms), self.to_ms)
        return math.exp(self.intercept + self.slope * math.log(ms))


def fitted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The line of each scope through the rows of the suite ``scopes``, as plain numbers.

    Args:
        rows: with ``plan``, ``eager_ms`` and ``speedup``; those without a speed-up are left out.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("speedup"):
            points.setdefault(row["plan"], []).append((math.log(row["eager_ms"]), math.log(row["speedup"])))
    return {plan: _line_through(found) for plan, found in points.items() if len(found) >= _LEAST_CASES}


_LEAST_CASES = 4


def _line_through(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    slope, intercept = linear_regression(*zip(*points, strict=True))
    errors = []
    for left_out in range(len(points)):
        others = [point for i, point in enumerate(points) if i != left_out]
        b, a = linear_regression(*zip(*others, strict=True))
        x, y = points[left_out]
        errors.append(y - a - b * x)
    times = [math.exp(x) for x, _ in points]
    return {
        "intercept": round(intercept, 4),
        "slope": round(slope, 4),
        "from_ms": round(min(times), 2),
        "to_ms": round(max(times), 2),
        "rms": round(math.sqrt(math.fsum(e * e for e in errors) / len(errors)), 4),
        "cases": len(points),
    }


def _load() -> dict[str, Line]:
    text = resources.files(__package__).joinpath("prior.json").read_text(encoding="utf-8")
    return {plan: Line(**line) for plan, line in json.loads(text)["lines"].items()}


PRIOR = _load()
"""By the name of the scope in the suite: ``step``, ``step+optimizer``, ``regions+optimizer``, ..."""
