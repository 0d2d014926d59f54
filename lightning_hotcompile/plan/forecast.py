"""Is compiling worth it: what it costs, what it saves, and a reason in words."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to compile, and the reason in words."""

    go: bool
    reason: str
    expected_cost_s: float | None = None
    expected_saving_s: float | None = None


def expected_compile_s(kinds: tuple[str, ...]) -> float:
    """Seconds that compiling regions of these kinds is expected to take."""
    return BASE_COMPILE_S + sum(SECONDS_PER_REGION.get(kind, 7.0) for kind in kinds)


def expected_speedup(kinds: tuple[str, ...]) -> float:
    """Eager time / compiled time that regions of these kinds are expected to give."""
    if "step" in kinds:
        return SPEEDUP_WITH_OPTIMIZER if "optimizer" in kinds else SPEEDUP_OF_STEP
    return SPEEDUP_OF_REGIONS


def forecast(
    *,
    remaining_steps: int | None,
    step_s: float | None,
    compile_s: float,
    speedup: float,
) -> Decision:
    """Weigh the time that compiling saves in the steps that are left against what it costs.

    Args:
        remaining_steps: training steps that are left, ``None`` if unknown (taken as many).
        step_s: seconds of an eager step, ``None`` if not measured yet.
        compile_s: expected seconds of compiling.
        speedup: expected eager time / compiled time.
    """
    if step_s is None:
        return Decision(go=True, reason="no step was measured yet: threshold=0 compiles at once")
    saved_share = 1 - 1 / speedup
    if remaining_steps is None:
        reason = f"the number of steps left is unknown, taken as many; a step takes {_ms(step_s)}"
        return Decision(go=True, reason=reason, expected_cost_s=compile_s)
    saving = remaining_steps * step_s * saved_share
    facts = (
        f"{remaining_steps:,} steps of {_ms(step_s)} are left, at an assumed speed-up of {speedup:.2f}x "
        f"compiling saves about {saving:.1f} s and costs about {compile_s:.0f} s"
    )
    go = saving > compile_s
    return Decision(
        go=go,
        reason=f"{'worth it' if go else 'not worth it'}: {facts}",
        expected_cost_s=compile_s,
        expected_saving_s=saving,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
