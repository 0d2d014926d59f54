"""Writes the store into one archive."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO

from lightning_hotcompile.store.archive import MANIFEST, Content, Manifest, is_known_name, sha256_of
from lightning_hotcompile.store.folder import open_regular
from lightning_hotcompile.swap.inductor.whole_files import UNFINISHED


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An archive that was written.

    Args:
        path: where it is.
        files: files in it.
        size: its bytes.
        sha256: its hash, to be told to the one who takes it in.
        left_out: bytes of compiled code of other machines or versions.
    """

    path: Path
    files: int
    size: int
    sha256: str
    left_out: int = 0


def export(path: Path, root: Path, sources: Iterable[Path], manifest: Manifest) -> Exported:
    """Write files below ``root`` and a manifest into an archive, as a whole or not at all.

    Files whose names no import would take are left out, and those that vanish meanwhile.

    Args:
        path: of the archive; compressed if it ends with ``gz``.
        root: the store's folder.
        sources: files below it.
        manifest: without files.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            files = _write(file, root, sources, manifest, compressed=path.suffix in (".gz", ".tgz"))
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = sha256_of(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(path=path, files=files, size=size, sha256=digest)


def _write(
    file: IO[bytes], root: Path, sources: Iterable[Path], manifest: Manifest, *, compressed: bool
) -> int:
    written: dict[str, Content] = {}
    with tarfile.open(fileobj=file, mode="w:gz" if compressed else "w", format=tarfile.PAX_FORMAT) as tar:
        for source in sources:
            name = source.relative_to(root).as_posix()
            if is_known_name(name) and not name.endswith(UNFINISHED):
                with contextlib.suppress(FileNotFoundError), open_regular(source) as content:
                    written[name] = _add(tar, name, content)
        data = replace(manifest, files=written).to_bytes()
        _add(tar, MANIFEST, BytesIO(data), size=len(data))
    return len(written)


class _Hashing:
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes], size: int | None = None) -> Content:
    """Files of the store are replaced, never changed: an open one keeps its size."""
    member = tarfile.TarInfo(name)
    member.size = os.fstat(content.fileno()).st_size if size is None else size
    member.mode = 0o600
    hashing = _Hashing(content)
    tar.addfile(member, hashing)
    return Content(size=member.size, sha256=hashing.digest.hexdigest())
