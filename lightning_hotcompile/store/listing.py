"""What is in the store, as rows for people."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from lightning_hotcompile.store import bounding, samples
from lightning_hotcompile.store.checked import InvalidRecord, NewerFormat
from lightning_hotcompile.store.folder import read_file
from lightning_hotcompile.store.profiles import MOST_BYTES, Profile


@dataclass(frozen=True, kw_only=True)
class StoreRow:
    """One line of the store's list.

    Args:
        kind: ``profile``, ``samples`` or ``compiler``.
        name: digest of the profile, of the machine, or of machine and PyTorch.
        size: bytes.
        used: last use, in seconds since 1970.
        text: what it is, in words.
    """

    kind: str
    name: str
    size: int
    used: float
    text: str


def profile_row(path: Path) -> StoreRow:
    """The row of a profile's file, also of one that cannot be read."""
    return _record_row("profile", path, _describe_profile)


def samples_row(path: Path) -> StoreRow:
    """The row of a file of compile costs, also of one that cannot be read."""
    return _record_row("samples", path, _describe_samples)


def compiler_row(folder: Path, *, own_tags: Container[str]) -> StoreRow:
    """The row of one of the compiler's folders."""
    entries = bounding.entries_of(folder)
    here = "this machine and PyTorch" if folder.name in own_tags else "another machine or PyTorch"
    return StoreRow(
        kind="compiler",
        name=folder.name,
        size=sum(e.size for e in entries),
        used=max((e.used for e in entries), default=folder.lstat().st_mtime),
        text=f"{len(entries)} entries of {here}",
    )


def _record_row(kind: str, path: Path, describe: Callable[[Path], str]) -> StoreRow:
    try:
        text = describe(path)
    except (OSError, InvalidRecord, NewerFormat) as error:
        text = f"not readable: {error}"
    status = path.lstat()
    return StoreRow(kind=kind, name=path.stem, size=status.st_size, used=status.st_mtime, text=text)


def _describe_profile(path: Path) -> str:
    profile = Profile.from_bytes(read_file(path, MOST_BYTES))
    speedup = "" if profile.speedup is None else f", {profile.speedup:.2f}x"
    forgone = "" if profile.forgone_s is None else f", {profile.forgone_s:.1f} s forgone"
    runs = "1 run" if profile.runs == 1 else f"{profile.runs} runs"
    return f"{profile.verdict}{speedup}{forgone}, scope {profile.scope}, {runs}, {profile.when}"


def _describe_samples(path: Path) -> str:
    return f"{len(samples.from_bytes(read_file(path, samples.MOST_BYTES)))} compile costs"
