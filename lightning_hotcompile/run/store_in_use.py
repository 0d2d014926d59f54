"""The store while a Trainer runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.store.compiler_cache import CompilerCacheUse
from lightning_hotcompile.store.folder import StoreError
from lightning_hotcompile.store.store import Store, open_store
from lightning_hotcompile.swap.inductor import paths as inductor_paths


class StoreInUse:
    """The store while a Trainer runs, with the compiler's cache pointed at it. Copies have it closed.

    Args:
        setting: the option ``store``.
        backend: the option ``backend``; only Inductor has a cache.
    """

    def __init__(self, setting: str | Path | None, backend: object) -> None:
        self._setting = setting
        self._backend = backend
        self._cache: CompilerCacheUse | None = None
        self._found_graphs = False
        self._is_refused = False
        self._folders: dict[bool, Path | None] = {}
        """The compiler's folder in the store, before and after the compiler was pointed at it."""

        self.store: Store | None = None

    def follow(self, config: HotCompileConfig) -> None:
        """Take the options as they are now, unless it is open; those of a callback may be replaced."""
        if self.store is None:
            self._setting, self._backend = config.store, config.backend

    def begin(self, *, on_cpu: bool = False) -> Store | None:
        """Open it; a second call gives what is open. A folder that cannot be used means no memory: once told.

        ``on_cpu``: the Trainer uses no accelerator, so nobody else is to begin with one.
        """
        if self.store is None and self._setting is not None and not self._is_refused:
            self.store = open_store(self._setting, on_cpu=on_cpu)
            self._is_refused = self.store is None
            self._folders.clear()
        return self.store

    def look_at_machine(self) -> None:
        """Know the machine, as each key does: before the first step, which would take longer for it."""
        if self.store is not None:
            _ = self.store.machine

    def begin_compiling(self) -> None:
        """Point the compiler at the cache; not before it is needed, since that imports the compiler."""
        if self._cache is None and self.store is not None and self._backend == "inductor":
            self._cache = self.store.use_compiler_cache().start()

    @property
    def why_not_kept(self) -> str:
        """Why the store does not keep what is compiled now; empty where it does, or has none to keep."""
        return "" if self._cache is None else self._cache.reason

    def has_toolchain(self) -> bool:
        """Whether the C++ compiler's toolchain was started where this Trainer would keep its code."""
        if self._backend != "inductor":
            return False
        ours = self._compilers_folder()
        with contextlib.suppress(OSError):  # Inductor has no folder
            return inductor_paths.holds_headers(
                ours / inductor_paths.HEADERS if ours is not None else inductor_paths.default_headers()
            )
        return False

    def holds_graphs(self) -> bool:
        """Whether there is any compiled graph where this Trainer would keep its code."""
        if not self._found_graphs:  # remembered: it may be asked before each step
            with contextlib.suppress(OSError):  # Inductor has no folder
                folder = self._compilers_folder() or inductor_paths.folder_in_use()
                self._found_graphs = inductor_paths.holds_graphs(folder)
        return self._found_graphs

    def _compilers_folder(self) -> Path | None:
        """The compiler's folder in the store; ``None`` if it uses, or would use, another one."""
        begun = self._cache is not None
        if begun not in self._folders:  # it may be asked for before each step
            self._folders[begun] = self._find_folder()
        return self._folders[begun]

    def _find_folder(self) -> Path | None:
        if self.store is None:
            return None
        try:
            folder = self.store.compiler_cache_dir
        except StoreError:
            return None
        is_ours = self._cache.active if self._cache is not None else not inductor_paths.chosen_by_user(folder)
        return folder if is_ours else None

    def end(self) -> None:
        """Give the compiler back its own folder, and keep ours within bounds; a second call does nothing."""
        cache, store = self._cache, self.store
        self._cache = self.store = None
        self._folders.clear()
        self._found_graphs = self._is_refused = False
        if cache is not None and store is not None:
            was_active = cache.active
            cache.stop()
            if was_active:
                store.bound()

    def __getstate__(self) -> dict[str, object]:
        closed: dict[str, object] = {"_cache": None, "store": None, "_folders": {}}
        return {**self.__dict__, **closed, "_found_graphs": False, "_is_refused": False}
