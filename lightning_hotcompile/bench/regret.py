"""Regret: what a run with the callback took, over the best of the other ways to run it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hotcompile.bench.arms import EAGER, HOTCOMPILE
from lightning_hotcompile.bench.runs import Mark, Run

GOAL = 1.05
COLD, WARM = "cold", "warm"
"""States of the compiler's cache: of the first training in a folder, and of the second one."""

PREPARED = "prepared"
"""The callback's training after one that compiled whatever it cost, as those of the other arms do."""

STATES = (COLD, WARM, PREPARED)
WARM_AGAIN = "warm again"
"""The third training in a folder: of a compiled arm, whose times are all measured twice."""

STATES_OF_OTHERS = (COLD, WARM, WARM_AGAIN)
MOST_DRIFT = 0.05
MOST_NORM, MOST_MOVED = 0.01, 0.1
"""How far an arm's weights may be from eager's, in norm and in how far they went. Random numbers and
rounding of compiled code are others than eager's; a run that does not learn is far outside."""

AGAIN = "eager again"
"""Eager's training once more, after the callback's: machines change in the meantime."""

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
    others_s: Mapping[str, tuple[float, float]]
    """Seconds of the other arms, each measured twice; those of the compiled ones are carried on."""

    steady_ms: float
    """A step of the callback's run in its second half."""

    slow_steps: float
    """Mean over typical time of the callback's steps: what the estimates of the others leave out."""

    worst_step_s: float
    phase: str
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The fastest of the other arms, by both of their times."""
        return min(self.others_s, key=lambda arm: sum(self.others_s[arm]))

    @property
    def best_s(self) -> float:
        """Seconds of the best other arm: chosen by one of its times, and timed by the other.

        The least of several times that are good to some per cent is less than any of them really is:
        five arms that do the same would each seem to lose to the luckiest.
        """
        first, second = (min(self.others_s, key=lambda arm: self.others_s[arm][i]) for i in (0, 1))
        return (self.others_s[first][1] + self.others_s[second][0]) / 2

    @property
    def regret(self) -> float:
        """Wall time with the callback over that of the best other arm; 1 is no regret."""
        return self.hotcompile_s / self.best_s


def carried_on(run: Run, steps: int, slowness: float = 1.0, step_s: float | None = None) -> float:
    """Seconds of ``Trainer.fit`` for ``steps``, from a run of another length.

    What was reached is measured: a mark at ``steps``, and what came before and after the steps. Beyond it
    the steady step is added for each further one.

    Args:
        run: with a mark at ``steps``, or shorter than ``steps``.
        steps: the length that is asked for.
        slowness: mean step over steady step in a run of that length.
        step_s: seconds of a steady step, where another run than this one has measured it.
    """
    step_s = run.end.steady_s if step_s is None else step_s
    around = run.before_s + max(0.0, run.wall_s - run.before_s - run.end.elapsed_s)
    if steps in run.marks:
        return around + run.marks[steps].elapsed_s
    return around + run.end.elapsed_s + (steps - run.steps) * slowness * step_s


def slowness(eager: Sequence[Run]) -> float:
    """Mean step of eager trainings over their steady step: rare slow steps are in long runs only."""
    if not eager:
        return 1.0
    return math.fsum(r.end.elapsed_s / r.steps / r.end.steady_s for r in eager) / len(eager)


def drift(runs: Runs) -> float | None:
    """Eager's step in the training at the end of a case over that of the same length before."""
    again = longest(runs, AGAIN)
    first = None if again is None else runs.get((EAGER, again.steps, COLD))
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
        eager = [r for (arm, n, _), r in runs.items() if arm in (EAGER, AGAIN) and n == steps]
        for state in STATES:
            hot = runs.get((HOTCOMPILE, steps, state))
            others = others_s(runs, steps, state, slowness(eager))
            if hot is not None and others:
                found.append(_cell(case, steps, state, hot, others, _notes(runs, hot, state)))
    return found


def others_s(runs: Runs, steps: int, state: str, slowness: float) -> dict[str, tuple[float, float]]:
    """Seconds of ``Trainer.fit`` by each of the other arms, measured twice.

    Eager before and after the callback; a compiled arm in its second and third training with the same
    cache. With an empty one it trains once, and its steady step is that of this or of the second training.

    Args:
        runs: of one case.
        steps: the length.
        state: of the callback's training; eager's are good for all, and a prepared one is compared with
            the warm ones of the others.
        slowness: mean step over steady step in a run of that length.
    """
    found = {}
    before, after = (runs.get((arm, steps, COLD)) for arm in (EAGER, AGAIN))
    at_length = [run.wall_s for run in (before, after) if run is not None]
    eager = longest(runs, EAGER)
    if at_length:
        found[EAGER] = at_length[0], at_length[-1]
    elif eager is not None:
        found[EAGER] = (carried_on(eager, steps),) * 2
    for arm, its in _compiled(runs).items():
        first, second = map(its.get, _compared_with(state))
        if first is not None:
            once = carried_on(first, steps, slowness)
            if second is None:
                found[arm] = once, once
            elif state == COLD:
                found[arm] = once, carried_on(first, steps, slowness, second.end.steady_s)
            else:
                found[arm] = once, carried_on(second, steps, slowness)
    return found


def _compared_with(state: str) -> tuple[str, str]:
    """The states of a compiled arm's two trainings that the callback's in this state is compared with."""
    return (COLD, WARM) if state == COLD else (WARM, WARM_AGAIN)


def _compiled(runs: Runs) -> dict[str, dict[str, Run]]:
    """The trainings of each arm that is neither eager nor the callback, by the state of its cache."""
    found: dict[str, dict[str, Run]] = {}
    for (arm, _, state), run in runs.items():
        if arm not in (EAGER, AGAIN, HOTCOMPILE):
            found.setdefault(arm, {})[state] = run
    return found


def _cell(
    case: str,
    steps: int,
    state: str,
    hot: Run,
    others: Mapping[str, tuple[float, float]],
    notes: tuple[str, ...],
) -> Cell:
    return Cell(
        case=case,
        steps=steps,
        cache=state,
        hotcompile_s=hot.wall_s,
        others_s=others,
        steady_ms=1e3 * hot.end.steady_s,
        slow_steps=hot.mean_s / hot.end.steady_s,
        worst_step_s=hot.worst_step_s,
        phase=hot.phase,
        reason=hot.reason,
        notes=notes,
    )


def _notes(runs: Runs, hot: Run, state: str) -> tuple[str, ...]:
    eager, notes = longest(runs, EAGER), []
    compared = [
        (arm, its[other])
        for arm, its in _compiled(runs).items()
        for other in _compared_with(state)
        if other in its
    ]
    if eager is not None:
        for arm, run in (*compared, (HOTCOMPILE, hot)):
            apart = trained_otherwise(run.end, eager.marks.get(run.steps))
            notes += [f"{arm} {apart}, so its time may be worth nothing"] if apart else []
    changed = drift(runs)
    if changed is not None and abs(changed - 1) > MOST_DRIFT:
        notes.append(f"the machine changed: eager's training took {changed:.2f} of its first time at the end")
    return tuple(dict.fromkeys(notes))


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
    }


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
            "best_s": round(c.best_s, 3),
            **{f"{arm}_s": round(sum(twice) / 2, 3) for arm, twice in c.others_s.items()},
            "steady_ms": round(c.steady_ms, 3),
            "slow_steps": round(c.slow_steps, 3),
            "worst_step_s": round(c.worst_step_s, 3),
            "phase": c.phase,
            "reason": c.reason,
            "notes": "; ".join(c.notes),
        }
        for c in cells
    ]
