"""Regret: what a run with the callback took, over the best of the other ways to run it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hotcompile.bench.arms import EAGER, HOTCOMPILE, UNCOMPILED
from lightning_hotcompile.bench.other_ways import (
    AGAIN,
    COLD,
    STATES,
    WARM,
    Runs,
    arm_of,
    compared_with,
    compiled,
    longest,
    others_s,
    slowness,
)
from lightning_hotcompile.bench.runs import Mark, Run

GOAL = 1.05
MOST_DRIFT = 0.05
LEAST_COMPILE_S = 0.5
"""A first training that compiles anything takes so much longer than one that finds it in the cache: the
toolchain's start alone takes some seconds."""

MOST_NORM, MOST_MOVED = 0.01, 0.1
"""How far an arm's weights may be from eager's, in norm and in how far they went. Random numbers and
rounding of compiled code are others than eager's; a run that does not learn is far outside."""


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


def drift(runs: Runs) -> float | None:
    """Eager's step in the training at the end of a case over that of the same length before."""
    again = longest(runs, AGAIN)
    first = None if again is None else runs.get((EAGER, again.steps, COLD))
    if again is None or first is None:
        return None
    return again.end.elapsed_s / first.end.elapsed_s


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
        for arm, its in compiled(runs).items()
        for other in compared_with(state)
        if other in its
    ]
    compared += [
        (arm_of(name), run)
        for (name, steps, _), run in runs.items()
        if steps == hot.steps and arm_of(name) in UNCOMPILED and arm_of(name) != EAGER
    ]
    if eager is not None:
        for arm, run in (*compared, (HOTCOMPILE, hot)):
            apart = trained_otherwise(run.end, eager.marks.get(run.steps))
            notes += [f"{arm} {apart}, so its time may be worth nothing"] if apart else []
    for arm, its in compiled(runs).items():
        if COLD in its and WARM in its and its[COLD].wall_s - its[WARM].wall_s < LEAST_COMPILE_S:
            notes.append(f"{arm} compiled nothing: its first training took no longer than its second")
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
