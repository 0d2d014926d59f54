"""What compiling a plan takes: by the kinds of its regions, and by what this machine has taken before."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_hotcompile.plan.prior import OpStatistics
from lightning_hotcompile.plan.scopes import Region

BASE_COMPILE_S = 0.75
"""Seconds until the first graph is compiled, beside the toolchain's start and its own (2 CPU cores)."""

TOOLCHAIN_S = 3.5
"""Seconds that the C++ compiler's probes and precompiled header add, once on a machine (2.1 to 5.0).

They take longer, but begin with the tracing where there is a second core and the model is on the CPU; else
they add about 6 s.
"""

SECONDS_PER_REGION = {"step": 5.7, "group": 3.1, "module": 2.9, "function": 2.5, "optimizer": 0.7}
"""Seconds for each further region, forward and backward (2 CPU cores, cold; a function was not measured).

For these and the tensors what was measured is divided by 1.2: so much slower was the machine at that time.
"""

SECONDS_PER_TENSOR = 0.2
"""Seconds for each tensor that a compiled optimizer steps (0.21 to 0.25 of four models, divided by 1.2)."""

KNOWN_STEP_S, SECONDS_PER_OP = 3.5, 0.013
"""Seconds for a whole step of which the operations are known, and for each that is not fusible.

Fitted to ``step+fused`` of the suite ``scopes``. For a case that the fit has not seen the error is 14%, with
one number for all steps 25%.
"""

AUTOTUNE = 10.0
"""Time of a compile with ``max-autotune`` over that without: assumed on the safe side, not measured.

Each matrix product is built and timed in many ways; users report compiles of up to a quarter of an hour.
"""

START_ON_ACCELERATOR_S = 5.0
"""Seconds that the first flip of a process takes more on an accelerator, with the code in the cache.

Two trainings on one H200 stood still for 5.0 and 7.5 s longer than the other constants say.
"""

RECENT = 20
"""So many of this machine's last compiles say how fast it compiles."""


def expected_compile_s(
    regions: Sequence[Region],
    history: Sequence[tuple[float, float]] = (),
    *,
    has_toolchain: bool = False,
    mode: str | None = None,
    ops: OpStatistics | None = None,
) -> float:
    """Seconds that compiling these regions takes with an empty compiler cache.

    Args:
        regions: of a plan.
        history: compiles of this machine with an empty cache, oldest first: seconds that would have been
            assumed, and seconds that they took. They say how fast this machine compiles.
        has_toolchain: whether the compiler's toolchain was started on this machine before.
        mode: Inductor's mode.
        ops: of the step, ``None`` if they were not recorded.
    """
    speeds = [seconds / assumed for assumed, seconds in history[-RECENT:] if assumed > 0]
    speed = median(speeds) if speeds else 1.0
    return assumed_compile_s(regions, has_toolchain=has_toolchain, mode=mode, ops=ops) * speed


def assumed_compile_s(
    regions: Sequence[Region],
    *,
    has_toolchain: bool = False,
    mode: str | None = None,
    ops: OpStatistics | None = None,
) -> float:
    """The same on the machine on which the constants were measured."""
    tensors = sum(region.tensors for region in regions)
    each = sum(_seconds_of(region.kind, ops) for region in regions)
    base = BASE_COMPILE_S + (0.0 if has_toolchain else TOOLCHAIN_S)
    usual = base + each + SECONDS_PER_TENSOR * tensors
    return AUTOTUNE * usual if mode is not None and mode.startswith("max-autotune") else usual


def _seconds_of(kind: str, ops: OpStatistics | None) -> float:
    if kind == "step" and ops is not None:
        return KNOWN_STEP_S + SECONDS_PER_OP * ops.others
    return SECONDS_PER_REGION.get(kind, SECONDS_PER_REGION["module"])
