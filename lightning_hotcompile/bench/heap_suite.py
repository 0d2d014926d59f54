"""The suite ``heap``: what eager steps gain once glibc keeps what they free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_hotcompile.bench.case_suite import CaseSuite, origin
from lightning_hotcompile.bench.kept_rows import Row, failures
from lightning_hotcompile.bench.regret import geometric_mean

KEPT, LEFT = "kept", "left"

HOW = """\
Each row has a process of its own, which trains eagerly, without the callback. After half of the steps glibc
is told to keep what is freed (`keep_freed_memory`), or it is left as it is: the control, which says what the
second half of the steps gains by itself. Rows of both kinds take turns. A ratio is the median step of the
first half over that of the second, above 1 the second is faster; the median over the rows of a kind, and in
brackets the least and the most. Page faults are those of a step, medians."""


@dataclass(frozen=True, kw_only=True)
class HeapSuite(CaseSuite):
    """Compares steps before and after.

    Raises:
        ConfigError: an unknown case, fewer than 10 steps, or no turn.
    """

    name = "heap"
    how_much = ("steps",)  # more turns are more rows

    steps: int = 150
    """Of each half."""

    turns: int = 3
    """Rows of each kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(steps=10, turns=1)

    @property
    def ways(self) -> Mapping[str, Mapping[str, Any]]:
        """Both kinds in turns."""
        return {f"{kind} {turn}": {} for turn in range(1, self.turns + 1) for kind in (KEPT, LEFT)}

    def arguments(self, case: str, plan: str) -> tuple[str, list[str]]:
        """The module that measures a row, and what it is told."""
        keep = ["--keep"] if plan.startswith(KEPT) else []
        return "lightning_hotcompile.bench.one_heap", [case, "--steps", str(self.steps), *keep]

    def line(self, row: Row) -> str:
        """A row for the console."""
        if row.get("before_ms") is None:
            return f"{row['case']}, {row['plan']}: {row['phase']}: {row['reason']}"
        return (
            f"{row['case']}, {row['plan']}: {row['before_ms']:.3g} -> {row['after_ms']:.3g} ms, "
            f"{row['before_faults']:,} -> {row['after_faults']:,} page faults"
        )

    def page(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
        """A table with a row for each case."""
        head = ["case", "page faults", "kept", "step in ms", "ratio", "ratio of the control"]
        table, ratios = [head, ["---"] * len(head)], list[float]()
        for case in dict.fromkeys(row["case"] for row in rows):
            kept, left = (_of_kind(rows, case, kind) for kind in (KEPT, LEFT))
            if not kept:
                continue
            ratios.append(median(map(_ratio, kept)))
            faults = [round(median(row[name] for row in kept)) for name in ("before_faults", "after_faults")]
            times = [median(row[name] for row in kept) for name in ("before_ms", "after_ms")]
            table.append(
                [
                    case,
                    f"{faults[0]:,}",
                    f"{faults[1]:,}",
                    f"{times[0]:.3g} to {times[1]:.3g}",
                    _spread(kept),
                    _spread(left),
                ]
            )
        mean = geometric_mean(ratios)
        parts = [
            "# Freed memory that stays",
            "Geometric mean of the ratios: " + ("not measured" if mean is None else f"{mean:.3f}."),
            HOW,
            "\n".join(f"| {' | '.join(line)} |" for line in table),
            *failures(rows),
            "## Where this comes from",
            origin(facts),
        ]
        return "\n\n".join(parts) + "\n"


def _of_kind(rows: Sequence[Row], case: str, kind: str) -> list[Row]:
    return [
        row
        for row in rows
        if row["case"] == case and row["plan"].startswith(kind) and row.get("before_ms") is not None
    ]


def _ratio(row: Row) -> float:
    return float(row["before_ms"] / row["after_ms"])


def _spread(rows: Sequence[Row]) -> str:
    ratios = sorted(map(_ratio, rows))
    return f"{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]" if ratios else ""
