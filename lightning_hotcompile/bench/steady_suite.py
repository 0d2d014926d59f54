"""The suite ``steady``: the step that the callback ends with, against eager and against compiled by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hotcompile.bench import apart
from lightning_hotcompile.bench.apart import WITHOUT
from lightning_hotcompile.bench.arms import EAGER, IN_PLACE
from lightning_hotcompile.bench.case_suite import CaseSuite, Runner, origin
from lightning_hotcompile.bench.kept_rows import FAILED, Row, failures, is_impossible
from lightning_hotcompile.bench.regret import geometric_mean
from lightning_hotcompile.bench.rows import check_names

BY_HAND_GOAL, EAGER_GOAL = 0.99, 1 / 1.05

HOW = """\
Each row has a process and an empty compiler cache of its own. Once the callback has decided, its steps and
those of another way to run the same model take turns in blocks of 20 steps (ours, theirs, theirs, ours): the
same process, weights, data and Trainer, the hooks of the callback on its own steps only. A number is their
step / our step: the median over pairs of neighbouring blocks, the first steps of each left out, with the 95%
interval of the sign test. Above 1 the callback's step is the faster one. The ways by hand are the columns:
`model` is `model.compile()`, `blocks` is `.compile()` on each repeated block, and `step` is `training_step`
compiled with its logs replayed, with the optimizer eager, compiled, or by torch's fused kernel. The goals: at
least 0.99 of the best of these, and at least 0.95 of eager. Some of these compiles lose to eager: the mean
with eager included is over the same cases. A way that failed is none of the best.

`without` is what a user sees who adds the callback: eager steps in a process that never had it, against the
callback's steps in another one. Only there the memory that stays with the process counts, which the eager
steps of a process with the callback gain by as well. Processes take turns; the median over the pairs, the
least and the most."""

COLUMNS = (EAGER, WITHOUT, *(arm for arm in IN_PLACE if arm != EAGER))


@dataclass(frozen=True, kw_only=True)
class SteadySuite(CaseSuite):
    """Compares steps on cases.

    Raises:
        ConfigError: an unknown case or arm, fewer than 12 blocks, no pair, or fewer than 10 steps.
    """

    name = "steady"
    how_much = ("blocks", "pairs", "steps")

    arms: Sequence[str]
    blocks: int = 60
    """Blocks of steps, of both ways together."""

    pairs: int = 3
    """Of processes, for the arm ``without``."""

    steps: int = 200
    """Timed in each of these processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("arms", self.arms, COLUMNS)
        self._at_least(blocks=12, pairs=1, steps=10)

    @property
    def ways(self) -> Mapping[str, Mapping[str, Any]]:
        """The other ways to run a case; the callback's options are the same for all."""
        return {arm: {} for arm in self.arms}

    def arguments(self, case: str, plan: str) -> tuple[str, list[str]]:
        """The module that measures a row, and what it is told."""
        return "lightning_hotcompile.bench.one_steady", [case, plan, "--blocks", str(self.blocks)]

    def runner_for(self, threads: int) -> Runner:
        """A row in one process; the arm ``without`` in several."""
        in_turns = super().runner_for(threads)

        def run(case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
            if plan != WITHOUT:
                return in_turns(case, plan, options, folder)
            return apart.in_pairs(apart.side(case, self.steps, options, folder, threads), self.pairs)

        return run

    def line(self, row: Row) -> str:
        """A row for the console."""
        if row.get("ratio") is None:
            return f"{row['case']}, {row['plan']}: {row['phase']}: {row['reason']}"
        return f"{row['case']}, {row['phase']}: {_ratio(row)} against {row['plan']}"

    def page(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
        """A table with a row for each case, and which of them miss a goal."""
        cases = dict.fromkeys(row["case"] for row in rows)
        arms = [arm for arm in COLUMNS if any(row["plan"] == arm for row in rows)]
        table = [["case", "callback", *arms, "of the best by hand"], ["---"] * (len(arms) + 3)]
        missed, bests, of_all = list[str](), list[float](), list[float]()
        for case in cases:
            found = {row["plan"]: row for row in rows if row["case"] == case}
            best = _best_by_hand(found)
            bests += [] if best is None else [best]
            of_all += _with_eager(found, best)
            cells = [_cell(found.get(arm)) for arm in arms]
            table.append([case, _phases(found), *cells, "" if best is None else f"{best:.3f}"])
            missed += _missed(case, found, best)
        eager, without = (_ratios(rows, arm) for arm in (EAGER, WITHOUT))
        means = [_mean("eager / ours", eager), _mean("the best by hand / ours", bests)]
        means[1:1] = [_mean("a run without the callback / ours", without)] if without else []
        means.append(_mean("the best of these and eager / ours", of_all))
        parts = [
            "# The step in the end",
            " ".join(means),
            HOW,
            "\n".join(f"| {' | '.join(line)} |" for line in table),
            "## Below a goal",
            "\n".join(f"- {line}" for line in missed) or "None.",
            *failures(rows),
            "## Where this comes from",
            origin(facts),
        ]
        return "\n\n".join(parts) + "\n"


def _ratios(rows: Sequence[Row], arm: str) -> list[float]:
    return [row["ratio"] for row in rows if row["plan"] == arm and row.get("ratio") is not None]


def _mean(what: str, ratios: Sequence[float]) -> str:
    mean = geometric_mean(ratios)
    if mean is None:
        return f"Geometric mean of {what}: not measured."
    return f"Geometric mean of {what}: {mean:.3f} ({len(ratios)} case{'s' * (len(ratios) != 1)})."


def _best_by_hand(found: Mapping[str, Row]) -> float | None:
    """Their step / ours for the fastest of the ways by hand."""
    by_hand = [row for arm, row in found.items() if arm not in (EAGER, WITHOUT)]
    return min((row["ratio"] for row in by_hand if row.get("ratio") is not None), default=None)


def _with_eager(found: Mapping[str, Row], best: float | None) -> list[float]:
    """Their step / ours for the fastest of the ways by hand and eager, where both were measured."""
    eager = found.get(EAGER, {}).get("ratio")
    return [] if best is None or eager is None else [min(best, eager)]


def _phases(found: Mapping[str, Row]) -> str:
    return ", ".join(dict.fromkeys(row["phase"] for row in found.values() if row.get("ratio") is not None))


def _missed(case: str, found: Mapping[str, Row], best: float | None) -> list[str]:
    lines = []
    if best is not None and best < BY_HAND_GOAL:
        arm = next(a for a in COLUMNS if a not in (EAGER, WITHOUT) and found.get(a, {}).get("ratio") == best)
        row = found[arm]
        lines.append(
            f"{case}: {_ratio(row)} against {arm} ({row['theirs_ms']:.3g} ms, ours {row['ours_ms']:.3g} ms); "
            f"{row['phase']}: {row['reason']}"
        )
    for arm, against in ((EAGER, "eager"), (WITHOUT, "a run without the callback")):
        row = found.get(arm, {})
        if row.get("ratio") is not None and row["ratio"] < EAGER_GOAL:
            lines.append(f"{case}: {_ratio(row)} against {against}; {row['phase']}: {row['reason']}")
    return lines


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.get("ratio") is not None:
        return _ratio(row)
    if is_impossible(row):
        return "not possible"
    return "failed" if row["phase"] == FAILED else "not measured"
