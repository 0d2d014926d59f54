"""Is compiling worth it: what it costs, what it saves, and a reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SPEEDUP_WITH_OPTIMIZER = 1.32
"""Assumed eager time / compiled time of a whole step with a compiled optimizer (11 small CPU models)."""

SPEEDUP_OF_STEP = 1.18
"""The same for the whole step alone (the same 11 models)."""

SPEEDUP_OF_REGIONS = 1.16
"""The same for compiled blocks (a Llama of 8B parameters on 8 GPUs: 1.157; small CPU models gain less)."""

BASE_COMPILE_S = 11.0
"""Seconds until the first graph is compiled, the toolchain's own start included (2 CPU cores, cold)."""

SECONDS_PER_REGION = {"step": 10.0, "group": 7.0, "module": 7.0, "function": 3.0, "optimizer": 4.0}
"""Seconds for each further region, forward and backward (a GPT of 4 blocks, 2 CPU cores, cold)."""

WARM_SHARE = 0.15
"""Compile time with a full compiler cache over that with an empty one (a GPT of 4 blocks: 2 s of 14)."""

RECENT = 20
"""So many of this machine's last compiles say how fast it compiles."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to compile, and the reason in words. ``wait``: not yet, ask again later."""

    go: bool
    reason: str
    wait: bool = False
    expected_cost_s: float | None = None
    expected_saving_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What compiling costs in seconds, and what it gains as eager time / compiled time."""

    compile_s: float
    speedup: float
    measured: bool = False
    """Whether an earlier run has measured the gain."""


def expected_compile_s(kinds: Sequence[str], history: Sequence[tuple[Sequence[str], float]] = ()) -> float:
    """Seconds that compiling regions of these kinds takes with an empty compiler cache.

    Args:
        kinds: of the regions.
        history: compiles of this machine with an empty cache, oldest first: kinds and seconds. Those
            of the same kinds are believed as they are; others say how fast this machine compiles.
    """
    same = [seconds for known, seconds in history if tuple(known) == tuple(kinds)]
    if same:
        return median(same[-RECENT:])
    speeds = [seconds / _assumed_compile_s(known) for known, seconds in history[-RECENT:]]
    return _assumed_compile_s(kinds) * (median(speeds) if speeds else 1.0)


def _assumed_compile_s(kinds: Sequence[str]) -> float:
    return BASE_COMPILE_S + sum(SECONDS_PER_REGION.get(kind, 7.0) for kind in kinds)


def expected_speedup(kinds: Sequence[str]) -> float:
    """Eager time / compiled time that regions of these kinds are expected to give."""
    if "step" in kinds:
        return SPEEDUP_WITH_OPTIMIZER if "optimizer" in kinds else SPEEDUP_OF_STEP
    return SPEEDUP_OF_REGIONS


def forecast(
    *,
    remaining_steps: int | None,
    step_s: float | None,
    expected: Expectation,
    spent_s: float = 0.0,
) -> Decision:
    """Weigh the time that compiling saves in the steps that are left against what it costs.

    If the number of steps left is unknown, the rule is that of renting or buying skis: compile once
    the run has taken as long as compiling costs. Whatever the length turns out to be, that takes at
    most about twice the time of the better choice.

    Args:
        remaining_steps: steps that are left, ``None`` if unknown.
        step_s: seconds of an eager step, ``None`` if not measured yet.
        expected: cost and gain.
        spent_s: seconds that this run has spent in steps so far.
    """
    cost = expected.compile_s
    if step_s is None:
        return Decision(go=True, reason="no step was measured yet: threshold=0 compiles at once")
    if remaining_steps is None:
        return _of_unknown_length(step_s, spent_s, cost)
    saving = remaining_steps * step_s * (1 - 1 / expected.speedup)
    gain = f"{'the measured' if expected.measured else 'an assumed'} speed-up of {expected.speedup:.2f}x"
    facts = (
        f"{remaining_steps:,} steps of {_ms(step_s)} are left, at {gain} "
        f"compiling saves about {saving:.1f} s and costs about {cost:.0f} s"
    )
    go = saving > cost
    return Decision(
        go=go,
        reason=f"{'worth it' if go else 'not worth it'}: {facts}",
        expected_cost_s=cost,
        expected_saving_s=saving,
    )


def _of_unknown_length(step_s: float, spent_s: float, cost: float) -> Decision:
    facts = (
        f"the number of steps left is unknown, a step takes {_ms(step_s)}; the run has spent "
        f"{spent_s:.1f} s in steps, compiling costs about {cost:.0f} s"
    )
    go = spent_s >= cost
    words = "worth the risk" if go else "waits until it has spent as much"
    return Decision(go=go, wait=not go, reason=f"{words}: {facts}", expected_cost_s=cost)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
