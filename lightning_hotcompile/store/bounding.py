"""Keeps the compiler's cache below a size: what was not used for longest goes first."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_hotcompile.swap.inductor.paths import HEADERS

GRACE_S = 3600.0
"""What was used within this time is never removed."""

_FOLDERS_OF_ENTRIES = {"fxgraph": 2, "aotautograd": 1, "triton": 2}
"""Below these each entry is a folder of its own, so many levels down."""

_LOCKS = "locks"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What Inductor needs together: a compiled graph, or a kernel's source with its library.

    Args:
        paths: files or folders that go together.
        size: bytes of all of them.
        used: when one of them was last read or written, in seconds since 1970.
        is_header: a precompiled header, of which running processes remember the path.
    """

    paths: tuple[Path, ...]
    size: int
    used: float
    is_header: bool = False


def entries_of(folder: Path) -> list[Entry]:
    """All entries of one of Inductor's folders; its locks and what it is just writing are none.

    A graph whose kernels are gone compiles them again, a kernel whose graph is gone is not asked for.
    So no entry needs another one, and each may go alone.
    """
    return [_entry(paths, is_header) for paths, is_header in _groups(folder)]


def _groups(folder: Path) -> Iterator[tuple[list[Path], bool]]:
    for top in _children(folder):
        if not top.is_dir() or top.is_symlink():
            yield [top], False
        elif top.name == HEADERS:
            for group in _by_stem(top):
                yield group, True
        elif top.name in _FOLDERS_OF_ENTRIES:
            for path in _at_depth(top, _FOLDERS_OF_ENTRIES[top.name]):
                yield [path], False
        elif len(top.name) == 2:
            for group in _by_stem(top):
                yield group, False
        else:
            yield [top], False


def _children(folder: Path) -> list[Path]:
    """What is in a folder; Inductor's temporary files begin with a dot."""
    try:
        return sorted(p for p in folder.iterdir() if p.name != _LOCKS and not p.name.startswith("."))
    except OSError:
        return []


def _by_stem(folder: Path) -> Iterator[list[Path]]:
    """Files of one hash: ``abc.cpp``, ``abc.so``, ``abc.main.so``."""
    groups = defaultdict(list)
    for path in _children(folder):
        groups[path.name.partition(".")[0]].append(path)
    yield from groups.values()


def _at_depth(folder: Path, depth: int) -> Iterator[Path]:
    for path in _children(folder):
        if depth > 1 and path.is_dir() and not path.is_symlink():
            yield from _at_depth(path, depth - 1)
        else:
            yield path


def files_below(path: Path) -> Iterator[Path]:
    """The file itself, or all files of a folder; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        yield path
        return
    for root, _, names in os.walk(path):
        yield from (Path(root, name) for name in names)


def _entry(paths: Iterable[Path], is_header: bool) -> Entry:
    paths, size, used = tuple(paths), 0, 0.0
    for file in (file for path in paths for file in files_below(path)):
        with contextlib.suppress(OSError):  # gone in the meantime
            status = file.lstat()
            size += status.st_size
            used = max(used, status.st_atime, status.st_mtime)
    return Entry(paths=paths, size=size, used=used, is_header=is_header)


def too_much(
    entries: Iterable[Entry], *, max_bytes: int, before: float, keep_headers: bool = False
) -> list[Entry]:
    """The entries to remove, least recently used first, until the rest has ``max_bytes`` or less.

    Args:
        entries: all there are.
        max_bytes: what may stay.
        before: entries used at this time or later stay in any case.
        keep_headers: precompiled headers stay in any case.
    """
    entries = sorted(entries, key=lambda e: e.used)
    excess = sum(e.size for e in entries) - max_bytes
    chosen: list[Entry] = []
    for entry in entries:
        if excess <= 0 or entry.used >= before:
            break
        if not (keep_headers and entry.is_header):
            chosen.append(entry)
            excess -= entry.size
    return chosen


def take_away(entries: Iterable[Entry], trash: Path) -> int:
    """Move entries into a folder that is removed afterwards; returns the bytes that went.

    Moving is one step for each path, so nobody ever finds half a folder.
    """
    gone = 0
    for number, entry in enumerate(entries):
        for part, path in enumerate(entry.paths):
            with contextlib.suppress(OSError):
                os.replace(path, trash / f"{number}-{part}")
        gone += entry.size
    return gone
