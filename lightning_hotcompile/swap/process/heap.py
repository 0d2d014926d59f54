"""glibc's heap: memory that each step gives back to the system and takes again, and how that ends.

A training makes and frees blocks of the same sizes in each step. glibc gives back what is free at the end of
its heap once that is more than its trim threshold, and maps blocks above its mmap threshold anew each time;
the next step then pays for each page that it touches. Both thresholds begin at 128 KiB, and grow whenever a
mapped block is freed: to its size, and to twice its size, up to 32 MiB (``mallopt(3)``). So what a step pays
depends on the largest block that happened to be freed before it: of small convolutional networks on 2 CPU
cores a tenth to a quarter of the time (suite ``heap``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

try:
    import resource
except ImportError:  # Windows, which has no glibc either
    resource = None  # type: ignore[assignment]

LARGEST = (32 << 20) - (64 << 10)
"""Bytes of a block that raises both thresholds to their most."""

_TRIES = 4
"""Blocks that may come from free memory in the heap before one is mapped."""

_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
"""Of ``struct mallinfo2`` (``mallinfo(3)``)."""

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def page_faults() -> int:
    """How often this process has touched a page that the system then gave it."""
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
    """Let glibc keep what is freed, until the process ends; whether it was glibc that was asked for memory.

    A large block is mapped and freed, none of its pages is touched. Blocks of jemalloc or tcmalloc do not
    show in glibc's own account. A second call does nothing new: such a block then comes from the heap.
    """
    try:
        process, account = ctypes.CDLL(None), _account()
        malloc, free = process.malloc, process.free
    except (OSError, AttributeError):  # a Python that was linked in an unusual way
        return False
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    blocks, mapped, in_heap = list[int](), False, False
    while not mapped and len(blocks) < _TRIES:
        before = account()
        block = malloc(LARGEST)
        if block is None:
            break
        blocks.append(block)
        grown = [after - then for after, then in zip(account(), before, strict=True)]
        mapped, in_heap = grown[0] >= LARGEST, in_heap or grown[1] >= LARGEST
    for block in blocks:
        free(block)
    return mapped or in_heap


def _account() -> Callable[[], tuple[int, int]]:
    """Glibc's own account: bytes in mapped blocks, and bytes in use in its heap.

    Raises:
        AttributeError: there is none.
    """
    libc = ctypes.CDLL("libc.so.6")
    has_wide = hasattr(libc, "mallinfo2")  # glibc 2.33
    read = libc.mallinfo2 if has_wide else libc.mallinfo
    number = ctypes.c_size_t if has_wide else ctypes.c_int
    kind = type("Account", (ctypes.Structure,), {"_fields_": [(name, number) for name in _FIELDS]})
    read.restype, read.argtypes = kind, []

    def account() -> tuple[int, int]:
        found = read()
        return found.hblkhd, found.uordblks

    return account
