"""Seconds that ways to run a case take without the callback, at any length: measured, or carried on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_hotcompile.bench.arms import EAGER, HOTCOMPILE, UNCOMPILED
from lightning_hotcompile.bench.runs import Run

COLD, WARM = "cold", "warm"
"""States of the compiler's cache: of the first training in a folder, and of the second one."""

PREPARED = "prepared"
"""The callback's training after one that compiled whatever it cost, as those of the other arms do."""

STATES = (COLD, WARM, PREPARED)
WARM_AGAIN = "warm again"
"""The third training in a folder: of a compiled arm, whose times are all measured twice."""

STATES_OF_OTHERS = (COLD, WARM, WARM_AGAIN)

_AGAIN = " again"

Runs = Mapping[tuple[str, int, str], Run]
"""The trainings of one case by arm, steps and cache; those of arms that compile nothing have ``cold``."""


def again(arm: str) -> str:
    """Name of the training of an arm that compiles nothing, once more, after the callback's.

    Machines change in the meantime.
    """
    return arm + _AGAIN


AGAIN = again(EAGER)


def arm_of(name: str) -> str:
    """The arm that is trained for a task of this name."""
    return name.removesuffix(_AGAIN)


def is_compiled(name: str) -> bool:
    """Whether the arm compiles up front: neither eager nor the callback."""
    return arm_of(name) not in (*UNCOMPILED, HOTCOMPILE)


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


def longest(runs: Runs, arm: str) -> Run | None:
    """The longest training of an arm."""
    found = [run for (name, _, _), run in runs.items() if name == arm]
    return max(found, key=lambda run: run.steps, default=None)


def others_s(runs: Runs, steps: int, state: str, slowness: float) -> dict[str, tuple[float, float]]:
    """Seconds of ``Trainer.fit`` by each of the other arms, measured twice.

    One that compiles nothing before and after the callback; a compiled arm in its second and third training
    with the same cache. With an empty one it trains once, and its steady step is that of this or of the
    second training.

    Args:
        runs: of one case.
        steps: the length.
        state: of the callback's training; those of arms that compile nothing are good for all, and a prepared
            one is compared with the warm ones of the others.
        slowness: mean step over steady step in a run of that length.
    """
    both = {arm: _uncompiled_s(runs, arm, steps) for arm in UNCOMPILED}
    found = {arm: twice for arm, twice in both.items() if twice is not None}
    for arm, its in compiled(runs).items():
        first, second = map(its.get, compared_with(state))
        if first is not None:
            once = carried_on(first, steps, slowness)
            if second is None:
                found[arm] = once, once
            elif state == COLD:
                found[arm] = once, carried_on(first, steps, slowness, second.end.steady_s)
            else:
                found[arm] = once, carried_on(second, steps, slowness)
    return found


def _uncompiled_s(runs: Runs, arm: str, steps: int) -> tuple[float, float] | None:
    """Of the trainings before and after the callback's; of the longest one where none has this length."""
    both = (runs.get((name, steps, COLD)) for name in (arm, again(arm)))
    at_length = [run.wall_s for run in both if run is not None]
    if at_length:
        return at_length[0], at_length[-1]
    other = longest(runs, arm)
    return None if other is None else (carried_on(other, steps),) * 2


def compared_with(state: str) -> tuple[str, str]:
    """The states of a compiled arm's two trainings that the callback's in this state is compared with."""
    return (COLD, WARM) if state == COLD else (WARM, WARM_AGAIN)


def compiled(runs: Runs) -> dict[str, dict[str, Run]]:
    """The trainings of each arm that compiles up front, by the state of its cache."""
    found: dict[str, dict[str, Run]] = {}
    for (arm, _, state), run in runs.items():
        if is_compiled(arm):
            found.setdefault(arm, {})[state] = run
    return found
