"""How many of the machine's cores this process has."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that the system lets this process use, where it can be asked; else all."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
