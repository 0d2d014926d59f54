"""The compiler's folders in the store: one for each machine and PyTorch, bounded together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from lightning_hotcompile.store import bounding, compiler_cache
from lightning_hotcompile.store.bounding import Entry
from lightning_hotcompile.store.compiler_cache import CompilerCacheUse
from lightning_hotcompile.store.folder import SafeFolder, StoreError
from lightning_hotcompile.store.forgiving import Forgiving
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.prewarm.leftovers import remove_left

COMPILER, USERS = "compiler", "users"
LOCK = "compiler"
_UNFIT = "and torch can name no file in it to the C++ compiler: choose another folder for the store"


class CacheRoom:
    """The compiler's folders, who uses them now, and how large they may be.

    Args:
        folder: the store's folder.
        now: the clock, seconds since 1970.
    """

    def __init__(self, folder: SafeFolder, now: Callable[[], float]) -> None:
        self._folder = folder
        self._now = now
        self._forgiving = Forgiving(folder, now)

    def folder_of(self, tag: str) -> Path:
        """The folder for the machine code with this tag; made if missing.

        Raises:
            StoreError: it cannot be made or trusted.
        """
        self._folder.room(COMPILER)
        return self._folder.room(f"{COMPILER}/{tag}")

    def folders(self) -> list[Path]:
        """The folders of all machines and versions that there are."""
        room = self._folder.room(COMPILER)
        return sorted(p for p in room.iterdir() if p.is_dir() and not p.is_symlink())

    def entries(self, tags: Container[str]) -> tuple[list[Entry], int]:
        """What there is with these tags, and the bytes of all else.

        Raises:
            StoreError: a folder with such a tag cannot be trusted.
        """
        found, others = [], 0
        for folder in self.folders():
            if folder.name in tags:
                found += bounding.entries_of(self.folder_of(folder.name))
            else:
                others += sum(entry.size for entry in bounding.entries_of(folder))
        return found, others

    def use(self, tag: str, *, for_cpp: bool) -> CompilerCacheUse:
        """Lets the compiler use the folder of this tag, from ``start()`` to ``stop()``.

        ``for_cpp``: what is compiled goes through the C++ compiler.
        """
        try:
            folder, users = self.folder_of(tag), self._folder.room(USERS)
        except StoreError as error:
            return CompilerCacheUse(None, reason=str(error))
        if for_cpp and not inductor_paths.fits_commands(folder):
            return CompilerCacheUse(None, reason=f"{folder} has a space or quote, {_UNFIT}")
        return CompilerCacheUse(folder, users, now=self._now)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody bounds, clears or fills the folders meanwhile.

        Raises:
            StoreBusy: another process did not let go in time.
        """
        with self._folder.locked(LOCK):
            yield

    def bound(self, max_bytes: int) -> int:
        """Remove what was not used for longest, but nothing of the last hour; the bytes removed.

        What killed runs have left of their child processes goes, too, however small the rest is.
        """
        what = "bound of the compiler's cache"
        return self._forgiving.attempt(what, lambda: self._bound(max_bytes), lock=LOCK) or 0

    def _bound(self, max_bytes: int) -> int:
        for folder in self.folders():
            remove_left(folder, self._now())
        return self._remove(max_bytes, self._now() - bounding.GRACE_S)

    def clear(self, before: float) -> int:
        """Remove what was last used before this time; returns the bytes removed.

        Raises:
            StoreBusy: the lock is held for too long.
            OSError: the folder cannot be changed.
        """
        with self.locked():
            return self._remove(0, before)

    def _remove(self, max_bytes: int, before: float) -> int:
        """Runs that are under way keep what they may have loaded, and headers of which they know the path."""
        running = compiler_cache.running_since(self._folder.room(USERS), self._now())
        if running and not compiler_cache.keeps_access_times(self._folder.path):
            return 0
        entries = [entry for folder in self.folders() for entry in bounding.entries_of(folder)]
        chosen = bounding.too_much(
            entries, max_bytes=max_bytes, before=min([before, *running]), keep_headers=bool(running)
        )
        with self._folder.scratch() as trash:
            return bounding.take_away(chosen, trash)
