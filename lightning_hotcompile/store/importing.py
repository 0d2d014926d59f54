"""Takes an archive in: all of it is verified before anything is placed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lightning_hotcompile.store import archive, profiles, samples
from lightning_hotcompile.store.archive import MANIFEST, Content, Manifest, chunks
from lightning_hotcompile.store.checked import InvalidRecord, NewerFormat
from lightning_hotcompile.store.folder import StoreError, new_file
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.store.records import PROFILES, SAMPLES
from lightning_hotcompile.store.samples import CompileSample

_PLAIN_FILE = (tarfile.REGTYPE, tarfile.AREGTYPE)
_LONGEST_READ = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The content of an archive whose hashes are right, on disk under numbers.

    Args:
        manifest: of the archive.
        profiles: all profiles.
        costs: compile costs by the digest of their machine.
        compiler_files: the rest by name (``compiler/<tag>/...``), each with the file that holds its content.
    """

    manifest: Manifest
    profiles: tuple[Profile, ...]
    costs: Mapping[str, tuple[CompileSample, ...]]
    compiler_files: Mapping[str, Path]

    @property
    def machines(self) -> list[tuple[Machine, str]]:
        """Where it was written and where its profiles are from, each with the version of PyTorch."""
        from_profiles = [(p.key.machine, p.key.torch) for p in self.profiles]
        return [(self.manifest.machine, self.manifest.torch), *from_profiles]

    def code_of(self, tags: Container[str]) -> dict[str, Path]:
        """The compiler's files of these tags, by name."""
        return {name: path for name, path in self.compiler_files.items() if name.split("/")[1] in tags}


def verify(path: Path, scratch: Path, *, sha256: str | None = None) -> Verified:
    """Unpack an archive into an empty folder and compare it with its manifest.

    Args:
        path: the archive.
        scratch: takes the files, under numbers instead of their names.
        sha256: the hash that the archive itself has to have, if it is known.

    Raises:
        StoreError: it is damaged, was tampered with, or holds what no export writes.
        OSError: a file cannot be read or written.
    """
    try:
        with open(path, "rb") as file:
            _check_hash(file, path, sha256)
            manifest, staged = _unpack(file, scratch)
        return _parsed(manifest, staged)
    except (InvalidRecord, NewerFormat) as error:
        raise StoreError(f"{path} is not taken in: {error}.") from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise StoreError(f"{path} is not taken in: it is no readable archive ({error}).") from error


def _check_hash(file: IO[bytes], path: Path, expected: str | None) -> None:
    if expected is not None:
        found = archive.sha256_of(file)
        if found != expected.strip().lower():
            raise StoreError(f"{path} is not taken in: its SHA-256 is {found}, expected is {expected}.")
        file.seek(0)


def _unpack(file: IO[bytes], scratch: Path) -> tuple[Manifest, dict[str, Path]]:
    found: dict[str, Content] = {}
    staged: dict[str, Path] = {}
    manifest = None
    with _tar(file) as tar:
        for number, member in enumerate(_plain_members(tar)):
            content = tar.extractfile(member)
            assert content is not None
            if member.name == MANIFEST:
                manifest = Manifest.from_bytes(content.read(member.size))
            else:
                staged[member.name] = scratch / str(number)
                found[member.name] = _stage(content, member.size, staged[member.name])
    if manifest is None:
        raise InvalidRecord("it has no manifest, so it is cut off or no archive of a store")
    _compare(manifest, found)
    return manifest, staged


@contextlib.contextmanager
def _tar(file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with contextlib.ExitStack() as stack:
        plain: Any = stack.enter_context(gzip.GzipFile(fileobj=file)) if compressed else file
        yield stack.enter_context(tarfile.open(fileobj=_ShortReads(plain), mode="r:"))  # type: ignore[call-overload]


class _ShortReads:
    """A file of which nobody can read much at once: a header may claim to have gigabytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= max(_LONGEST_READ, archive.MOST_MANIFEST_BYTES):
            raise InvalidRecord(f"a header of {size:,} bytes is no header")
        return self._file.read(size)


def _plain_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members in order, until one is not what an export writes."""
    names: set[str] = set()
    total = 0
    for member in tar:
        name = member.name
        if member.type not in _PLAIN_FILE or member.sparse is not None:
            raise InvalidRecord(f"{name[:200]!r} is no plain file")
        if name != MANIFEST and not archive.is_known_name(name):
            raise InvalidRecord(f"the name {name[:200]!r} does not belong into a store")
        if name in names:
            raise InvalidRecord(f"{name!r} is in it twice")
        names.add(name)
        total += member.size
        if member.size < 0 or total > archive.MOST_BYTES or len(names) > archive.MOST_FILES:
            raise InvalidRecord(
                f"it unpacks to more than {archive.MOST_BYTES:,} bytes or {archive.MOST_FILES:,} files"
            )
        if name == MANIFEST and member.size > archive.MOST_MANIFEST_BYTES:
            raise InvalidRecord(f"its manifest has {member.size:,} bytes")
        yield member


def _stage(content: IO[bytes], size: int, target: Path) -> Content:
    digest = hashlib.sha256()
    with new_file(target) as file:
        for piece in chunks(content, size):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return Content(size=file.tell(), sha256=digest.hexdigest())


def _compare(manifest: Manifest, found: Mapping[str, Content]) -> None:
    for name in sorted({*manifest.files, *found}):
        if manifest.files.get(name) != found.get(name):
            raise InvalidRecord(f"{name!r} is not what the manifest says: damaged or tampered with")


def _parsed(manifest: Manifest, staged: dict[str, Path]) -> Verified:
    found: list[Profile] = []
    costs: dict[str, tuple[CompileSample, ...]] = {}
    rest: dict[str, Path] = {}
    for name, path in staged.items():
        room, _, inner = name.partition("/")
        if room == PROFILES:
            found.append(_profile(name, path))
        elif room == SAMPLES:
            costs[Path(inner).stem] = samples.from_bytes(_small(name, path, samples.MOST_BYTES))
        else:
            rest[name] = path
    return Verified(manifest=manifest, profiles=tuple(found), costs=costs, compiler_files=rest)


def _profile(name: str, path: Path) -> Profile:
    profile = Profile.from_bytes(_small(name, path, profiles.MOST_BYTES))
    if name != f"{PROFILES}/{profile.key.digest}.json":
        raise InvalidRecord(f"{name!r} holds the profile of another key")
    return profile


def _small(name: str, path: Path, most: int) -> bytes:
    if path.stat().st_size > most:
        raise InvalidRecord(f"{name!r} has more than {most:,} bytes")
    return path.read_bytes()
