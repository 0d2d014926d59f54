"""Folders of child processes in the compiler's own: a training that is killed cannot remove its child's."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

PREFIX = "prewarm-"
_LEFT_S = 86_400.0  # no child works for so long


def remove_left(cache_dir: Path, now: float) -> None:
    """Remove the folders to which no child has written for a day; what cannot be removed stays.

    Args:
        cache_dir: the compiler's folder, in which children have theirs.
        now: seconds since 1970.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(cache_dir):
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # another process removes it, too
                    if entry.stat(follow_symlinks=False).st_mtime < now - _LEFT_S:
                        shutil.rmtree(entry.path, ignore_errors=True)
