"""What compiling a plan takes: by the kinds of its regions, and by what this machine has taken before."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_hotcompile.plan.scopes import Region

BASE_COMPILE_S = 2.5
"""Seconds until the first graph is compiled, beside the toolchain's start and its own (2 CPU cores)."""

TOOLCHAIN_S = 6.5
"""Seconds that the C++ compiler's probes and precompiled header take, once on a machine (5.9 to 7.3)."""

SECONDS_PER_REGION = {"step": 7.0, "group": 4.5, "module": 3.5, "function": 3.0, "optimizer": 0.5}
"""Seconds for each further region, forward and backward (suite ``scopes``, 2 CPU cores, cold)."""

SECONDS_PER_TENSOR = 0.45
"""Seconds for each tensor that a compiled optimizer steps (the same)."""

RECENT = 20
"""So many of this machine's last compiles say how fast it compiles."""


def expected_compile_s(
    regions: Sequence[Region], history: Sequence[tuple[float, float]] = (), *, has_toolchain: bool = False
) -> float:
    """Seconds that compiling these regions takes with an empty compiler cache.

    Args:
        regions: of a plan.
        history: compiles of this machine with an empty cache, oldest first: seconds that would have been
            assumed, and seconds that they took. They say how fast this machine compiles.
        has_toolchain: whether the compiler's toolchain was started on this machine before.
    """
    speeds = [seconds / assumed for assumed, seconds in history[-RECENT:] if assumed > 0]
    return assumed_compile_s(regions, has_toolchain=has_toolchain) * (median(speeds) if speeds else 1.0)


def assumed_compile_s(regions: Sequence[Region], *, has_toolchain: bool = False) -> float:
    """The same on the machine on which the constants were measured."""
    tensors = sum(region.tensors for region in regions)
    each = sum(SECONDS_PER_REGION.get(region.kind, SECONDS_PER_REGION["module"]) for region in regions)
    base = BASE_COMPILE_S + (0.0 if has_toolchain else TOOLCHAIN_S)
    return base + each + SECONDS_PER_TENSOR * tensors
