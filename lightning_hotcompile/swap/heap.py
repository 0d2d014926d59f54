"""glibc's heap: memory that each step gives back to the system and takes again, and how that ends.

A training makes and frees blocks of the same sizes in each step. glibc gives back what is free at the end of
its heap once that is more than its trim threshold, and maps blocks above its mmap threshold anew each time;
the next step then pays for each page that it touches. Both thresholds begin at 128 KiB, and grow whenever a
mapped block is freed: to its size, and to twice its size, up to 32 MiB (``mallopt(3)``). So what a step pays
depends on the largest block that happened to be freed before it: of small convolutional networks on 2 CPU
cores between a tenth and a third of the time.
"""

from __future__ import annotations

import ctypes
import os

LARGEST = (32 << 20) - (64 << 10)
"""Bytes of a block that raises both thresholds to their most."""

KEPT = 64 << 20
"""Bytes that may stay free at the end of the heap then."""

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def page_faults() -> int:
    """How often this process has touched a page that the system then gave it."""
    import resource  # not on Windows, which has no glibc either

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def why_not_kept() -> str | None:
    """Why glibc is not to be told to keep what is freed, or ``None``."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        name = ""
    if not name.startswith("glibc"):
        return "the C library is not glibc"
    chosen = [setting for setting in _SETTINGS if setting in os.environ]
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"{chosen[0]} is set" if chosen else None


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, up to :data:`KEPT` bytes, until the process ends; whether it was told.

    One large block is made and freed, none of its pages is touched. A second call does nothing new.
    """
    try:
        libc = ctypes.CDLL(None)
        malloc, free = libc.malloc, libc.free
    except (OSError, AttributeError):  # a Python that was linked in an unusual way
        return False
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    block = malloc(LARGEST)
    free(block)
    return block is not None
