"""The store's folder: where it is, whether it can be trusted, and writes that never tear.

What lies in it is code that PyTorch will load: a folder in which somebody else could put a file is
refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import platformdirs
from filelock import FileLock

from lightning_hotcompile.errors import HotCompileError

ENVIRONMENT = "HOTCOMPILE_STORE"
SCRATCH = "tmp"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class StoreError(HotCompileError):
    """The store cannot be used, or an archive cannot be taken in."""


class StoreBusy(StoreError):
    """Another process holds a lock of the store for longer than we wait."""


def default_folder() -> Path:
    """The folder in ``HOTCOMPILE_STORE``, else the platform's place for a user's caches.

    Raises:
        StoreError: there is no such place (no home folder).
    """
    given = os.environ.get(ENVIRONMENT, "").strip()
    folder = Path(given or platformdirs.user_cache_path("lightning-hotcompile", appauthor=False))
    folder = _expanded(folder)
    if not given and not folder.is_absolute():
        raise StoreError(f"this user has no home folder: set {ENVIRONMENT} to a folder for the store.")
    return folder


def _expanded(folder: Path) -> Path:
    with contextlib.suppress(RuntimeError):  # no home folder: kept as it is written
        return folder.expanduser()
    return folder


def why_not_trusted(folder: Path, *, in_trusted: bool = False) -> str | None:
    """Why nothing may be kept in this folder, or ``None`` if it can be trusted.

    Args:
        folder: to be looked at.
        in_trusted: whether the folder that it is in was found to be trusted, and so were all above that.

    Raises:
        OSError: it is not there or cannot be looked at.
    """
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode):
        return f"it is a symbolic link to {os.readlink(folder)!r}: name the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    user = getattr(os, "geteuid", None)
    if user is None:  # Windows: the rights of the user's own folders come from their parent
        return None
    if status.st_uid != user():
        return f"it belongs to user {status.st_uid}, not to this user ({user()})"
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        return f"others can write to it (mode {mode:04o}): run chmod 700 on it"
    return None if in_trusted else why_replaceable(folder)


def why_replaceable(folder: Path) -> str | None:
    """Who can write to a parent can put another folder in place, but for a sticky one such as /tmp."""
    for parent in folder.resolve().parents:
        mode = stat.S_IMODE(os.stat(parent).st_mode)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace it: {parent} has mode {mode:04o}"
    return None


def is_mounted(folder: Path, flag: str) -> bool:
    """Whether the disk of this folder has a flag such as ``ST_NOEXEC``; not where the system does not say.

    Raises:
        OSError: the folder cannot be looked at.
    """
    statvfs, bit = getattr(os, "statvfs", None), getattr(os, flag, 0)
    return bool(statvfs and statvfs(folder).f_flag & bit)


class SafeFolder:
    """A folder of this user's alone, with rooms in it, atomic writes and locks.

    Args:
        path: created with mode 0700 where it is missing.
        lock_timeout: seconds that a lock is waited for.

    Raises:
        StoreError: the folder cannot be made, written to or trusted.
    """

    def __init__(self, path: Path, *, lock_timeout: float = 2.0) -> None:
        self.path = _expanded(Path(path)).absolute()
        self._lock_timeout = lock_timeout
        self._without_locks = False
        try:
            if not self.path.parent.exists():
                _make_parents(self.path)
        except OSError as error:
            raise StoreError(f"the store {str(self.path)!r} cannot be made: {error}.") from error
        self._make(self.path)
        self.room(SCRATCH)

    def room(self, name: str) -> Path:
        """A folder inside, made with mode 0700 and checked like the store itself.

        What it lies in was checked before, the store when it was opened; a room in a room is asked for
        after that.

        Raises:
            StoreError: it cannot be made, written to or trusted.
        """
        self._make(self.path / name, in_trusted=True)
        return self.path / name

    def _make(self, folder: Path, *, in_trusted: bool = False) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            reason = why_not_trusted(folder, in_trusted=in_trusted)
            if reason is None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                reason = "it cannot be written to (no right to, or a read-only disk)"
        except OSError as error:
            reason = str(error)
        if reason is not None:
            raise StoreError(f"the store's folder {str(folder)!r} is not used: {reason}.")

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Only one process at a time is in here for each name.

        Raises:
            StoreBusy: another process did not let go in time; or there are no locks, as was told before.
            StoreError: the folder is gone, or there are no locks on its disk.
        """
        if self._without_locks:
            raise StoreBusy(f"there are no locks in the store {str(self.path)!r}.")
        if not self.path.is_dir():  # the lock would make it anew, with other rights
            raise StoreError(f"the store {str(self.path)!r} is gone.")
        lock = FileLock(self.path / f"{name}.lock", timeout=self._lock_timeout, mode=0o600)
        try:
            lock.acquire(poll_interval=0.01)
        except (OSError, NotImplementedError) as error:
            if self._has_locks():
                raise StoreBusy(f"the store {str(self.path)!r} is locked ({error}).") from error
            self._without_locks = True
            raise StoreError(
                f"files cannot be locked on its disk ({error or type(error).__name__}), nothing is kept."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _has_locks(self) -> bool:
        """Whether there is a lock to be had that nobody else can hold."""
        try:
            with self.scratch() as scratch, FileLock(scratch / "lock", timeout=0):
                return True
        except (OSError, NotImplementedError):
            return False

    def write(self, path: Path, data: bytes) -> None:
        """Put a file in place as a whole or not at all, even if the power fails.

        Raises:
            OSError: it cannot be written.
        """
        with self.scratch() as scratch:
            temporary = scratch / "file"
            with new_file(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new empty folder on the same disk, gone afterwards with all that is in it."""
        folder = Path(tempfile.mkdtemp(dir=self.path / SCRATCH))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, before: float) -> None:
        """Remove what killed processes left in the scratch room before this time (seconds since 1970)."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path / SCRATCH):
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    remove(Path(entry.path))


def _make_parents(folder: Path) -> None:
    for parent in reversed(folder.parents):
        with contextlib.suppress(FileExistsError):
            if not parent.exists():
                parent.mkdir(mode=0o700)  # mkdir(parents=True) would leave their rights to the umask


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it; links are not followed and errors are left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def new_file(path: Path) -> IO[bytes]:
    """A new file that only this user can read, open for writing.

    Raises:
        OSError: it is there already or cannot be made.
    """
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, open for reading.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it is a link or no regular file, or cannot be read.
    """
    # Without O_NONBLOCK a named pipe of that name would hold the training for ever.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file of limited size.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it is a link or no regular file, is too large, or cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes:,} bytes")
    return data


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
