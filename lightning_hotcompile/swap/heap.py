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

LARGEST = (32 << 20) - (64 << 10)
"""Bytes of a block that raises both thresholds to their most."""

_IS_MAPPED = 2
"""The bit in a block's header, the word before it, which says that it was mapped."""

_TRIES = 4
"""Blocks that may come from free memory in the heap before one is mapped."""

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
    if not _malloc_is_glibcs():
        return "another allocator than glibc's is in use"
    chosen = [setting for setting in _SETTINGS if setting in os.environ]
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"{chosen[0]} is set" if chosen else None


def _malloc_is_glibcs() -> bool:
    """Not if jemalloc or tcmalloc was loaded before it, or if that cannot be told."""
    try:
        used, own = (ctypes.CDLL(library).malloc for library in (None, "libc.so.6"))
    except (OSError, AttributeError):
        return False
    return ctypes.cast(used, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, until the process ends; whether there was memory for it.

    A large block is mapped and freed, none of its pages is touched. Only where :func:`why_not_kept` has no
    reason: blocks of other allocators have no such headers. A second call does nothing new: such a block
    then comes from the heap.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    blocks = list[int]()
    mapped = False
    while not mapped and len(blocks) < _TRIES:
        block = libc.malloc(LARGEST)
        if block is None:
            break
        blocks.append(block)
        header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t))
        mapped = bool(header.value & _IS_MAPPED)
    for block in blocks:
        libc.free(block)
    return bool(blocks)
