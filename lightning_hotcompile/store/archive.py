"""What an archive of the store holds: plain files with known names, and a manifest with their hashes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO

from lightning_hotcompile.store import checked
from lightning_hotcompile.store.cache_room import COMPILER
from lightning_hotcompile.store.checked import InvalidRecord
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.records import PROFILES, SAMPLES
from lightning_hotcompile.swap.prewarm.leftovers import PREFIX

FORMAT = 1
KIND = "hotcompile archive"
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20
MOST_FILES = 200_000
MOST_BYTES = 16 << 30
"""What an archive may unpack to."""

_CHUNK = 1 << 20
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}"
_NAME = re.compile(
    rf"{PROFILES}/[0-9a-f]{{32}}\.json"
    rf"|{SAMPLES}/[0-9a-f]{{16}}\.json"
    rf"|{COMPILER}/[0-9a-f]{{16}}(?!/{PREFIX})(/{_PART}){{1,6}}"
)
_HASH = re.compile(r"[0-9a-f]{64}")


def is_known_name(name: str) -> bool:
    """Whether a file of this name belongs into the store: no way out of it, nothing hidden, of no child."""
    return _NAME.fullmatch(name) is not None


def chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The next ``size`` bytes of a file in pieces; fewer if it ends before."""
    while size > 0:
        piece = file.read(min(size, _CHUNK))
        if not piece:
            return
        size -= len(piece)
        yield piece


def sha256_of(file: IO[bytes]) -> str:
    """The hash of the rest of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in chunks(file, 1 << 62):
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Content:
    """Size and hash of one file.

    Raises:
        InvalidRecord: a field has a wrong type or is out of range.
    """

    size: int
    sha256: str

    def __post_init__(self) -> None:
        checked.check(self, _CONTENT_RULES)


_CONTENT_RULES = {
    "size": checked.whole(0, MOST_BYTES),
    "sha256": checked.Rule(
        lambda v: isinstance(v, str) and _HASH.fullmatch(v) is not None, "64 hexadecimal digits"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Which files an archive has, and where they come from.

    Args:
        package: version of this package.
        torch: version of PyTorch.
        machine: where it was written.
        files: content of each file by name.

    Raises:
        InvalidRecord: a field has a wrong type, or a name does not belong into the store.
    """

    package: str
    torch: str
    machine: Machine
    files: Mapping[str, Content]

    def __post_init__(self) -> None:
        checked.check(self, _MANIFEST_RULES)
        for name in self.files:
            if not is_known_name(name):
                raise InvalidRecord(f"the name {name[:200]!r} does not belong into a store")

    def to_bytes(self) -> bytes:
        """The content of the manifest's file."""
        return checked.wrap(asdict(self), kind=KIND, version=FORMAT)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the manifest's file.

        Raises:
            InvalidRecord: it is no valid manifest.
            NewerFormat: a later version of the package wrote it.
        """
        fields = checked.exact_fields(checked.unwrap(data, kind=KIND, version=FORMAT), cls)
        if not isinstance(fields["files"], dict):
            raise InvalidRecord("the manifest's files are no mapping")
        files = {
            name: Content(**checked.exact_fields(entry, Content)) for name, entry in fields["files"].items()
        }
        return cls(**{**fields, "machine": Machine.from_dict(fields["machine"]), "files": files})


_MANIFEST_RULES = {
    "package": checked.line(least=1),
    "torch": checked.line(least=1),
    "machine": checked.of_type(Machine),
}
