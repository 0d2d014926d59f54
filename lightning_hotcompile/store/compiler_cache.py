"""The compiler's cache in a lasting folder: on for the time of a fit, then as it was."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from lightning_hotcompile.store.folder import is_mounted
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.inductor.whole_files import UNFINISHED, WholeFiles, is_cut_short

LEAST_FREE_BYTES = 1 << 30
_MOST_ARMING_S = 1.0  # of a training that waits
_FOLLOWS = os.utime not in os.supports_follow_symlinks  # Windows knows no times of a link itself
_LONGEST_LINK_S = 60.0
_LONGEST_LINK_OF_OTHERS_S = 600.0
_LONGEST_RUN_S = 14 * 86_400.0
_USER = re.compile(r"(\d+)-\d+-[0-9a-f]+\.lock")


class CompilerCacheUse:
    """Points the compiler at a lasting folder between :meth:`start` and :meth:`stop`.

    It stays off, with the reason in :attr:`reason`, where the user has chosen a folder, where compiled
    code could not be loaded from (``noexec``) and where the disk is nearly full. A context manager too.

    Args:
        folder: the compiler's folder, ``None`` if there is none.
        users: folder in which running processes are marked, so that nothing is removed under them.
        reason: why there is no folder.
        now: the clock, seconds since 1970.
    """

    def __init__(
        self,
        folder: Path | None,
        users: Path | None = None,
        *,
        reason: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._users = users
        self._now = now
        self._undo: Callable[[], None] | None = None
        self._mark: FileLock | None = None
        self._whole_files = WholeFiles()
        self.reason = reason

    @property
    def active(self) -> bool:
        """Whether the compiler uses the folder now."""
        return self._undo is not None

    def start(self) -> CompilerCacheUse:
        """Point the compiler at the folder, if it may be; a second call does nothing."""
        if self._folder is None or self._users is None or self.active:
            return self
        try:
            self.reason = why_not(self._folder) or ""
            if not self.reason:
                self._mark = _marked(self._users, self._now())
                alone = len(running_since(self._users, self._now())) == 1
                _arm(self._folder, self._now(), alone=alone)
                self._undo = inductor_paths.point_at(self._folder)
                self._whole_files.__enter__()
        except (OSError, NotImplementedError, ImportError) as error:
            self.reason = f"the compiler's cache folder cannot be used: {error}"
            self._unmark()
        return self

    def stop(self) -> None:
        """Undo :meth:`start`; a second call does nothing."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._whole_files.__exit__()
        self._unmark()

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.release()
            with contextlib.suppress(OSError):
                os.unlink(self._mark.lock_file)
            self._mark = None

    def __enter__(self) -> CompilerCacheUse:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def why_not(folder: Path) -> str | None:
    """Why the compiler should not use this folder, or ``None``.

    Raises:
        OSError: the folder cannot be looked at.
    """
    chosen = inductor_paths.chosen_by_user(folder)
    if chosen is not None:
        return f"{inductor_paths.FOLDER}={chosen} is set, so the compiler's cache stays there"
    if is_mounted(folder, "ST_NOEXEC"):
        return f"{folder} is on a disk from which no code is loaded (noexec)"
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        return f"the disk of {folder} has {free / 2**20:,.0f} MiB left, less than 1 GiB"
    return None


def keeps_access_times(folder: Path) -> bool:
    """Whether reading a file leaves a trace here.

    Raises:
        OSError: the folder cannot be looked at.
    """
    return not is_mounted(folder, "ST_NOATIME")


def _marked(users: Path, now: float) -> FileLock:
    """A lock that this process holds while it uses the folder; the system lets go if it is killed."""
    mark = FileLock(users / f"{int(now)}-{os.getpid()}-{secrets.token_hex(4)}.lock", timeout=0, mode=0o600)
    mark.acquire()
    return mark


def running_since(users: Path, now: float) -> list[float]:
    """When the processes that use the folder now have begun, in seconds since 1970.

    Marks of processes that were killed are removed, after a minute: a new one may not be held yet. A disk
    without locks of the system's cannot tell who was killed on another machine: there they go after 14 days.
    """
    found = []
    for path, since in _marks(users):
        if abs(now - since) < 60 or (not _is_forgotten(path, now - since) and _is_held(path)):
            found.append(since)
    return found


def _marks(users: Path) -> Iterator[tuple[Path, float]]:
    for path in sorted(users.iterdir()):
        match = _USER.fullmatch(path.name)
        if match:
            yield path, float(match[1])


def _is_forgotten(path: Path, age: float) -> bool:
    """Of a lock that is only a file, which names its owner: the system's own leave the file empty."""
    with contextlib.suppress(OSError):
        if age > _LONGEST_RUN_S and path.stat().st_size > 0:
            path.unlink()
            return True
    return False


def _is_held(path: Path) -> bool:
    probe = FileLock(path, timeout=0)
    try:
        probe.acquire()
    except (OSError, NotImplementedError):
        return True
    probe.release()
    with contextlib.suppress(OSError):
        path.unlink()
    return False


def _arm(folder: Path, now: float, *, alone: bool) -> None:
    """Make the next use of each file visible, and remove what a killed compile has left half done.

    Most disks write down the first access after a change of the file, later ones once a day: writing
    the same times again counts as such a change. Of a header the compiler only asks whether it is there.
    On a disk behind a network each file takes long, and training waits: after a second the rest is left.
    """
    until = time.monotonic() + _MOST_ARMING_S
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    for file in itertools.takewhile(lambda _: time.monotonic() < until, files):
        with contextlib.suppress(OSError):
            status = file.lstat()
            if _is_over(status.st_mtime, now, alone) and _is_half(file):
                file.unlink()
            elif inductor_paths.HEADERS in file.parts:
                os.utime(file, follow_symlinks=_FOLLOWS)
            else:
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=_FOLLOWS)


def _is_half(file: Path) -> bool:
    """Of half a library torch asks only whether it is there, and could never load it."""
    return file.suffix == UNFINISHED or (file.suffix == ".so" and is_cut_short(file))


def _is_over(written: float, now: float, alone: bool) -> bool:
    """Whether nobody can be writing it any more; a C++ compiler may go on after the process that asked."""
    return now - written > (_LONGEST_LINK_S if alone else _LONGEST_LINK_OF_OTHERS_S)
