"""Regret: what a run with the callback took, over the best of the other ways to run it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hotcompile.bench.arms import EAGER, HOTCOMPILE
from lightning_hotcompile.bench.runs import Mark, Run

GOAL = 1.05
STEADY_GOAL = 1.01
CACHES = ("cold", "warm")
"""States of the compiler's cache: of the first training in a folder, and of the second one."""

PREPARED = "prepared"
"""The callback's training after one that compiled whatever it cost, as those of the other arms do."""

STATES = (*CACHES, PREPARED)
MOST_DRIFT = 0.05
MOST_NORM, MOST_MOVED = 0.01, 0.1
"""How far an arm's weights may be from eager's, in norm and in how far they went. Random numbers and
rounding of compiled code are others than eager's; a run that does not learn is far outside."""

AGAIN = "eager again"
"""Eager's longest training once more, after the callback's: machines change in the meantime."""

Runs = Mapping[tuple[str, int, str], Run]
"""The trainings of one case by arm, steps and cache; eager's have the cache ``cold``."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case at one length with one state of the compiler's cache."""

    case: str
    steps: int
    cache: str
    """``cold``, ``warm`` or ``prepared``; the last is compared with the warm ones of the other arms."""

    hotcompile_s: float
    others_s: Mapping[str, float]
    """Seconds of the other arms: eager's measured, those of the compiled ones carried on."""

    steady_ms: float
    """A step of the callback's run in its second half."""

    others_steady_ms: Mapping[str, float]
    slow_steps: float
    """Mean over typical time of the callback's steps: what the estimates of the others leave out."""

    worst_step_s: float
    phase: str
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The fastest of the other arms."""
        return min(self.others_s, key=self.others_s.__getitem__)

    @property
    def regret(self) -> float:
        """Wall time with the callback over that of the best other arm; 1 is no regret."""
        return self.hotcompile_s / self.others_s[self.best]

    @property
    def best_steady(self) -> str:
        """The other arm with the fastest step once it is compiled."""
        return min(self.others_steady_ms, key=self.others_steady_ms.__getitem__)

    @property
    def steady_ratio(self) -> float:
        """The callback's steady step over the best other one."""
        return self.steady_ms / self.others_steady_ms[self.best_steady]


def carried_on(run: Run, steps: int, slowness: float = 1.0) -> float:
    """Seconds of ``Trainer.fit`` for ``steps``, from a run of another length.

    What was reached is measured: a mark at ``steps``, and what came before and after the steps. Beyond it
    the steady step is added for each further one.

    Args:
        run: with a mark at ``steps``, or shorter than ``steps``.
        steps: the length that is asked for.
        slowness: mean step over steady step in a run of that length.
    """
    around = run.before_s + max(0.0, run.wall_s - run.before_s - run.end.elapsed_s)
    if steps in run.marks:
        return around + run.marks[steps].elapsed_s
    return around + run.end.elapsed_s + (steps - run.steps) * slowness * run.end.steady_s


def slowness(eager: Sequence[Run]) -> float:
    """Mean step of eager trainings over their steady step: rare slow steps are in long runs only."""
    if not eager:
        return 1.0
    return math.fsum(r.end.elapsed_s / r.steps / r.end.steady_s for r in eager) / len(eager)


def drift(runs: Runs) -> float | None:
    """Eager's step in the training at the end of a case over that of the same length before."""
    again = longest(runs, AGAIN)
    first = None if again is None else runs.get((EAGER, again.steps, CACHES[0]))
    if again is None or first is None:
        return None
    return again.end.elapsed_s / first.end.elapsed_s


def longest(runs: Runs, arm: str) -> Run | None:
    """The longest training of an arm."""
    found = [run for (name, _, _), run in runs.items() if name == arm]
    return max(found, key=lambda run: run.steps, default=None)


def cells_of(case: str, runs: Runs, lengths: Sequence[int]) -> list[Cell]:
    """The cells of one case for which there is a run of the callback and of at least one other arm."""
    found = []
    for steps in lengths:
        for cache in STATES:
            hot, others = runs.get((HOTCOMPILE, steps, cache)), _others(runs, steps, cache)
            if hot is not None and others:
                eager = [r for (arm, n, _), r in runs.items() if arm in (EAGER, AGAIN) and n == steps]
                notes = _notes(runs, hot, others)
                found.append(_cell(case, steps, cache, hot, others, eager, notes))
    return found


def _others(runs: Runs, steps: int, cache: str) -> dict[str, Run]:
    """The run of each other arm that says most about this length; eager's is good for all caches."""
    state_of_others = min(cache, CACHES[-1], key=STATES.index)
    found: dict[str, list[Run]] = {}
    for (arm, _, state), run in runs.items():
        if arm not in (HOTCOMPILE, AGAIN) and (state == state_of_others or arm == EAGER):
            found.setdefault(arm, []).append(run)
    return {
        arm: max(them, key=lambda r: (r.steps == steps, steps in r.marks, r.steps))
        for arm, them in found.items()
    }


def _cell(
    case: str,
    steps: int,
    cache: str,
    hot: Run,
    others: Mapping[str, Run],
    eager: Sequence[Run],
    notes: tuple[str, ...],
) -> Cell:
    others_s = {arm: carried_on(run, steps, slowness(eager)) for arm, run in others.items()}
    if eager:  # before and after the callback's trainings
        others_s[EAGER] = math.fsum(run.wall_s for run in eager) / len(eager)
    return Cell(
        case=case,
        steps=steps,
        cache=cache,
        hotcompile_s=hot.wall_s,
        others_s=others_s,
        steady_ms=1e3 * hot.end.steady_s,
        others_steady_ms={arm: 1e3 * run.end.steady_s for arm, run in others.items()},
        slow_steps=hot.mean_s / hot.end.steady_s,
        worst_step_s=hot.worst_step_s,
        phase=hot.phase,
        reason=hot.reason,
        notes=notes,
    )


def _notes(runs: Runs, hot: Run, others: Mapping[str, Run]) -> tuple[str, ...]:
    eager, notes = longest(runs, EAGER), []
    if eager is not None:
        for arm, run in {**others, HOTCOMPILE: hot}.items():
            apart = trained_otherwise(run.end, eager.marks.get(run.steps))
            notes += [f"{arm} {apart}, so its time may be worth nothing"] if apart else []
    changed = drift(runs)
    if changed is not None and abs(changed - 1) > MOST_DRIFT:
        notes.append(f"the machine changed: eager's training took {changed:.2f} of its first time at the end")
    return tuple(notes)


def trained_otherwise(mark: Mark, eager: Mark | None) -> str | None:
    """In what an arm's weights differ too much from eager's after the same steps."""
    if eager is None:
        return None
    if abs(mark.weights - eager.weights) > MOST_NORM * eager.weights or not math.isfinite(mark.weights):
        return f"ended with weights of norm {mark.weights:.4g} where eager has {eager.weights:.4g}"
    if abs(mark.moved - eager.moved) > MOST_MOVED * eager.moved:
        return f"moved its weights by {mark.moved:.4g} where eager moved them by {eager.moved:.4g}"
    return None


def geometric_mean(values: Iterable[float]) -> float | None:
    """Of positive numbers; None of no number."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """What the cells say together, in plain types."""
    return {
        "cells": len(cells),
        "goal": GOAL,
        "geometric_mean": {
            cache: geometric_mean(c.regret for c in cells if c.cache == cache) for cache in STATES
        },
        "above_goal": [f"{c.case}, {c.steps} steps, {c.cache}" for c in cells if c.regret > GOAL],
        "largest_regret": max((c.regret for c in cells), default=None),
        "worst_step_s": max((c.worst_step_s for c in cells), default=None),
        "steady_goal": STEADY_GOAL,
        "steady_within_goal": [c.case for c in _last_in_the_end(cells) if c.steady_ratio <= STEADY_GOAL],
        "steady_outside_goal": [c.case for c in _last_in_the_end(cells) if c.steady_ratio > STEADY_GOAL],
    }


def in_the_end(cells: Sequence[Cell]) -> list[Cell]:
    """Of each case those of its longest training, for its steady step."""
    last = {c.case: max(other.steps for other in cells if other.case == c.case) for c in cells}
    return [c for c in cells if c.steps == last[c.case]]


def _last_in_the_end(cells: Sequence[Cell]) -> list[Cell]:
    """One cell a case: the callback's last training, in which it knows most."""
    return list({c.case: c for c in sorted(in_the_end(cells), key=lambda c: STATES.index(c.cache))}.values())


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One flat row for each cell, for a table."""
    return [
        {
            "case": c.case,
            "steps": c.steps,
            "cache": c.cache,
            "regret": round(c.regret, 3),
            "best": c.best,
            "hotcompile_s": round(c.hotcompile_s, 3),
            **{f"{arm}_s": round(seconds, 3) for arm, seconds in c.others_s.items()},
            "steady_ms": round(c.steady_ms, 3),
            "best_steady": c.best_steady,
            "steady_ratio": round(c.steady_ratio, 3),
            "slow_steps": round(c.slow_steps, 3),
            "worst_step_s": round(c.worst_step_s, 3),
            "phase": c.phase,
            "reason": c.reason,
            "notes": "; ".join(c.notes),
        }
        for c in cells
    ]
