"""How many of the machine's cores this process has."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Those that the system lets this process use, where it can be asked; else all. At least 1.

    A container's limit of processor time counts as so many cores.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Seconds of processor time per second that a control group (version 2) may take."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no control group, or no limit ("max")
