"""A forked process gets pages of its own at once, not one by one when it first writes to each.

Until then it shares them with the process from which it was forked. Python writes to all that it looks at (it
counts references), so in a forked process code that runs for the first time takes about twice as long as in
one that has imported it itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux, from 5.14 on (``madvise(2)``)."""

_MAPS = Path("/proc/self/smaps")


def make_pages_own() -> bool:
    """Copy what is shared; whether that was possible (not before Linux 5.14, and not elsewhere)."""
    try:
        text = _MAPS.read_text("ascii", errors="replace")
    except OSError:
        return False
    advise = ctypes.CDLL(None, use_errno=True).madvise
    asked = [
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE)
        for start, end in _private(text)
    ]
    return bool(asked) and not any(asked)


def _private(text: str) -> Iterator[tuple[int, int]]:
    """Where this process alone will write and somebody has written: heaps, variables of libraries, stacks."""
    addresses = ""
    for line in text.splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            addresses = name if values[0] == "rw-p" else ""
        elif name == "Rss:" and addresses and values[0] != "0":
            start, _, end = addresses.partition("-")
            yield int(start, 16), int(end, 16)
