"""What earlier runs have learned, in one folder of the user's.

What a training calls never raises because of the disk: it warns once and goes on without memory.
What a person asks for (list, clear, export, import) raises :class:`StoreError`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from lightning_hotcompile.errors import warn
from lightning_hotcompile.store import bounding, exporting, importing, listing, placing, tags
from lightning_hotcompile.store.archive import Manifest
from lightning_hotcompile.store.cache_room import CacheRoom
from lightning_hotcompile.store.compiler_cache import CompilerCacheUse
from lightning_hotcompile.store.exporting import Exported
from lightning_hotcompile.store.folder import SafeFolder, StoreError, default_folder
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.listing import StoreRow
from lightning_hotcompile.store.placing import Imported
from lightning_hotcompile.store.profiles import Profile, ProfileKey
from lightning_hotcompile.store.records import Records
from lightning_hotcompile.store.samples import CompileSample
from lightning_hotcompile.version import __version__

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 << 30
"""What the compiler's cache may hold; the precompiled C++ header alone has 150 MB."""


def open_store(setting: str | Path | None, *, on_cpu: bool = False) -> Store | None:
    """The store for the option ``store``: ``"auto"``, a folder, or ``None``; ``on_cpu`` as of :class:`Store`.

    A folder that cannot be used gives ``None``: the run then has no memory. For one that was asked for
    that is a warning, for the user's cache folder a log line.
    """
    if setting is None:
        return None
    try:
        return Store(None if setting == "auto" else Path(setting), on_cpu=on_cpu)
    except StoreError as error:
        message = f"{error} This run remembers nothing."
        if setting == "auto":
            _log.warning(message)
        else:
            warn(message)
        return None


class Store:
    """Profiles, compile costs and the compiler's cache of all runs of this user.

    Args:
        folder: ``None`` for ``HOTCOMPILE_STORE`` or the platform's place for caches.
        machine: this machine; looked at when it is first needed.
        on_cpu: whether only the CPU is in use, so that accelerators are not to be touched.
        lock_timeout: seconds to wait for another process before a write is left out.
        now: the clock, seconds since 1970.

    Raises:
        StoreError: the folder cannot be made, written to or trusted.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        machine: Machine | None = None,
        on_cpu: bool = False,
        lock_timeout: float = 2.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = SafeFolder(folder or default_folder(), lock_timeout=lock_timeout)
        self._records = Records(self._folder, now)
        self._cache = CacheRoom(self._folder, now)
        self._given_machine = machine
        self._on_cpu = on_cpu
        self._now = now

    @property
    def folder(self) -> Path:
        """Where all of it lies."""
        return self._folder.path

    @cached_property
    def machine(self) -> Machine:
        """Where this process runs."""
        return self._given_machine or Machine.here(on_cpu=self._on_cpu)

    def key(self, *, plan: str, signature: str) -> ProfileKey:
        """The key of a plan and a step signature here and now: this machine, these versions."""
        return ProfileKey(
            plan=plan,
            signature=signature,
            machine=self.machine,
            torch=torch.__version__,
            package=__version__,
        )

    def find(self, key: ProfileKey) -> Profile | None:
        """What is known for this key. A file that is damaged or not ours counts as nothing."""
        return self._records.find(key)

    def remember(self, profile: Profile) -> bool:
        """Keep a profile, merged with what is known already; whether that was possible.

        :func:`~lightning_hotcompile.store.profiles.merged` says what is kept of which.
        """
        return self._records.remember(profile)

    def compile_samples(self) -> tuple[CompileSample, ...]:
        """What compiling has cost on this machine, oldest first."""
        return self._records.compile_samples(self.machine.digest)

    def add_compile_sample(self, *new: CompileSample) -> bool:
        """Keep what a compile has cost; of many only the newest stay. Whether that was possible."""
        return self._records.add_compile_samples(self.machine.digest, new)

    @property
    def compiler_tag(self) -> str:
        """Names the machine code that runs here: processor, devices, threads, PyTorch and Python."""
        return tags.tag_of(self.machine)

    @property
    def compiler_cache_dir(self) -> Path:
        """The folder of the compiler's cache for this machine and this PyTorch; made if missing.

        Raises:
            StoreError: it cannot be made or trusted.
        """
        return self._cache.folder_of(self.compiler_tag)

    def use_compiler_cache(self) -> CompilerCacheUse:
        """Lets the compiler use its folder here from ``start()`` to ``stop()``; never raises."""
        return self._cache.use(self.compiler_tag, for_cpp=self._on_cpu)

    def bound(self, max_bytes: int = DEFAULT_MAX_BYTES) -> int:
        """Remove of the compiler's cache what was not used for longest; returns the bytes removed.

        What was used in the last hour, or since the oldest run that is under way began, stays. So do
        precompiled headers while any run is under way: it would not notice that they are gone.
        """
        return self._cache.bound(max_bytes)

    def ls(self) -> list[StoreRow]:
        """What is in the store: profiles, compile costs, then the compiler's folders.

        Raises:
            StoreError: the folder cannot be read any longer.
        """
        with _as_store_error():
            own_tags = self._tags_here()
            return [
                *map(listing.profile_row, self._records.profiles()),
                *map(listing.samples_row, self._records.samples()),
                *(listing.compiler_row(f, own_tags=own_tags) for f in self._cache.folders()),
            ]

    def clear(self, older_than: float | None = None) -> int:
        """Forget what was not used for so many seconds, or all; returns the bytes removed.

        What a run that is under way may use of the compiler's cache stays.

        Raises:
            StoreError: a lock is held for too long, or the folder cannot be changed.
        """
        before = float("inf") if older_than is None else self._now() - older_than
        with _as_store_error():
            return self._records.clear(before) + self._cache.clear(before)

    def export(self, path: Path, *, compiler_cache: bool = True) -> Exported:
        """Write the store into one archive: ``.tar``, or ``.tar.gz`` by its name.

        Of the compiler's cache the parts of this machine and this PyTorch are taken, for each number of
        threads and kind of devices of which there is a verdict. The result has the archive's hash: tell it
        to the one who takes it in.

        Raises:
            StoreError: the archive cannot be written.
        """
        manifest = Manifest(package=__version__, torch=torch.__version__, machine=self.machine, files={})
        with _as_store_error():
            code, others = self._cache.entries(self._tags_here()) if compiler_cache else ([], 0)
            sources = (
                *self._records.profiles(),
                *self._records.samples(),
                *(file for entry in code for path in entry.paths for file in bounding.files_below(path)),
            )
            done = exporting.export(Path(path).absolute(), self.folder, sources, manifest)
            return replace(done, left_out=others)

    def import_(self, path: Path, *, compiler_cache: bool = True, sha256: str | None = None) -> Imported:
        """Take in what :meth:`export` has written; nothing is placed before all of it was verified.

        The hashes inside tell damage. Against somebody who rewrote the archive helps only ``sha256``,
        learned in another way: the compiler's cache is code, take it only from those you trust.

        Args:
            path: the archive.
            compiler_cache: whether to take the compiler's cache too.
            sha256: the archive's own hash, as :meth:`export` has told it.

        Raises:
            StoreError: the archive is damaged, was tampered with, or holds what no export writes.
        """
        with _as_store_error(), self._folder.scratch() as scratch:
            content = importing.verify(Path(path), scratch, sha256=sha256)
            imported = placing.place_records(content, self._records)
            if not compiler_cache or not content.compiler_files:
                return imported
            ours = content.code_of(tags.tags_here(self.machine, content.machines))
            code = placing.place_code(ours, self._cache)
            foreign = self._why_foreign(content.manifest, len(content.compiler_files) - len(ours))
            return replace(imported, compiler_files=code, left_out=(*imported.left_out, *foreign))

    def _tags_here(self) -> frozenset[str]:
        return tags.tags_here(self.machine, self._records.machines())

    def _why_foreign(self, origin: Manifest, files: int) -> tuple[str, ...]:
        """Why compiled code of another place is left out: it may not run here, or run wrongly."""
        if not files:
            return ()
        here = f"here is torch {torch.__version__} on {self.machine}"
        there = f"it was written with torch {origin.torch} on {origin.machine}"
        return (f"{files:,} files of compiled code of another machine, PyTorch or Python ({there}, {here})",)


@contextlib.contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"the store cannot be read or changed: {error}.") from error
