"""How many of the machine's cores this process has."""

from __future__ import annotations

import math
import os
from pathlib import Path

from lightning_hotcompile.swap.process.control_groups import groups_of


def usable_cores(root: Path = Path("/")) -> int:
    """Those that the system lets this process use, where it can be asked; else all. At least 1.

    A limit of processor time counts as so many cores: containers and batch systems set one.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    limits = [limit for group in groups_of("cpu", root) if (limit := group.cores()) is not None]
    return max(1, min([cores, *map(math.ceil, limits)]))
