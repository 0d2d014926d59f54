"""Profiles and compile costs as files: one for each key, read and written with a lock around."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

from lightning_hotcompile.store import samples
from lightning_hotcompile.store.checked import InvalidRecord, NewerFormat
from lightning_hotcompile.store.folder import SafeFolder, read_file
from lightning_hotcompile.store.forgiving import Forgiving
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.profiles import MOST_BYTES, Profile, ProfileKey, merged
from lightning_hotcompile.store.samples import CompileSample

PROFILES, SAMPLES = "profiles", "samples"
MOST_PROFILES = 2000
LOCK = "records"


class Records:
    """The files of profiles, and of compile costs for each machine.

    Args:
        folder: the store's folder.
        now: the clock, seconds since 1970.

    Raises:
        StoreError: a folder cannot be made or trusted.
    """

    def __init__(self, folder: SafeFolder, now: Callable[[], float]) -> None:
        self._folder = folder
        self._now = now
        self._forgiving = Forgiving(folder, now)
        self._profiles, self._samples = folder.room(PROFILES), folder.room(SAMPLES)

    def path_of(self, key: ProfileKey) -> Path:
        """The file of the profile with this key, whether it is there or not."""
        return self._profiles / f"{key.digest}.json"

    def find(self, key: ProfileKey) -> Profile | None:
        """What is known for this key; its file counts as used now."""
        with self._forgiving.ignoring_newer():
            found = self._read(key)
            if found is not None:
                self._used(self.path_of(key))
            return found
        return None

    def _read(self, key: ProfileKey) -> Profile | None:
        path = self.path_of(key)
        with self._forgiving.reading(path):
            profile = Profile.from_bytes(read_file(path, MOST_BYTES))
            if profile.key != key:
                raise InvalidRecord("it holds the profile of another key")
            return profile
        return None

    def remember(self, profile: Profile, *, adds: bool = True) -> bool:
        """Keep a profile, merged with what is known already; whether that was possible.

        ``adds`` is false for one that may tell of runs that are counted already.
        """
        return self._forgiving.attempt("profile", lambda: self._remember(profile, adds), lock=LOCK) or False

    def _remember(self, profile: Profile, adds: bool) -> bool:
        known = self._read(profile.key)
        now = datetime.fromtimestamp(self._now(), timezone.utc).isoformat(timespec="seconds")
        new = profile if known is None else merged(known, profile, now=now, adds=adds)
        self._folder.write(self.path_of(profile.key), new.to_bytes())
        if known is None:
            _keep_newest(self.profiles(), MOST_PROFILES)
        return True

    def compile_samples(self, machine: str) -> tuple[CompileSample, ...]:
        """What compiling has cost on the machine with this digest, oldest first; used now, too."""
        with self._forgiving.ignoring_newer():
            found = self._read_samples(machine)
            if found:
                self._used(self.samples_path(machine))
            return found
        return ()

    def _used(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the disk may be read only by now
            os.utime(path, (self._now(), self._now()))

    def _read_samples(self, machine: str) -> tuple[CompileSample, ...]:
        path = self.samples_path(machine)
        with self._forgiving.reading(path):
            return samples.from_bytes(read_file(path, samples.MOST_BYTES))
        return ()

    def add_compile_samples(self, machine: str, new: Iterable[CompileSample]) -> bool:
        """Keep what compiles have cost, each once; whether that was possible."""
        return self._forgiving.attempt("compile cost", lambda: self._add(machine, new), lock=LOCK) or False

    def _add(self, machine: str, new: Iterable[CompileSample]) -> bool:
        known = self._read_samples(machine)
        kept = sorted({*known, *new}, key=lambda s: (datetime.fromisoformat(s.when), repr(s)))
        self._folder.write(self.samples_path(machine), samples.to_bytes(kept))
        return True

    def samples_path(self, machine: str) -> Path:
        """The file of what compiling has cost on the machine with this digest."""
        return self._samples / f"{machine}.json"

    def profiles(self) -> list[Path]:
        """The files of all profiles, by name."""
        return sorted(self._profiles.glob("*.json"))

    def machines(self) -> set[tuple[Machine, str]]:
        """Where the profiles are from: machines with versions of PyTorch. Unreadable ones tell nothing."""
        found = set()
        for path in self.profiles():
            with contextlib.suppress(OSError, InvalidRecord, NewerFormat):
                key = Profile.from_bytes(read_file(path, MOST_BYTES)).key
                found.add((key.machine, key.torch))
        return found

    def samples(self) -> list[Path]:
        """The files of compile costs, by name; one for each machine."""
        return sorted(self._samples.glob("*.json"))

    def clear(self, before: float) -> int:
        """Remove the files that were last used before this time; returns their bytes.

        Raises:
            StoreBusy: a lock is held for too long.
            OSError: a file cannot be removed.
        """
        with self._folder.locked(LOCK):
            return sum(_removed(path, before) for path in (*self.profiles(), *self.samples()))


def _keep_newest(paths: list[Path], most: int) -> None:
    if len(paths) > most:
        for path in sorted(paths, key=lambda p: p.lstat().st_mtime)[: len(paths) - most]:
            path.unlink(missing_ok=True)


def _removed(path: Path, before: float) -> int:
    status = path.lstat()
    if status.st_mtime >= before:
        return 0
    path.unlink(missing_ok=True)
    return status.st_size
