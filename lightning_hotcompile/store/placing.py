"""Puts the content of a verified archive into the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_hotcompile.store.cache_room import CacheRoom
from lightning_hotcompile.store.importing import Verified
from lightning_hotcompile.store.records import Records


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was taken in.

    Args:
        profiles: profiles that were new or newer.
        samples: files of compile costs.
        compiler_files: files of the compiler's cache that were not there.
        left_out: what was not taken, in words.
    """

    profiles: int
    samples: int
    compiler_files: int
    left_out: tuple[str, ...] = ()


def place_records(content: Verified, records: Records) -> Imported:
    """Merge the profiles and compile costs of an archive with those that are there."""
    new = [p for p in content.profiles if records.find(p.key) != p]
    kept = sum(records.remember(p, adds=False) for p in new)
    costs = sum(records.add_compile_samples(machine, costs) for machine, costs in content.costs.items())
    lost = len(new) - kept + len(content.costs) - costs
    left_out = (f"{lost} profiles or compile costs that could not be written",) if lost else ()
    return Imported(profiles=kept, samples=costs, compiler_files=0, left_out=left_out)


def place_code(files: Mapping[str, Path], cache: CacheRoom) -> int:
    """Put the compiler's files in place, but replace none that is there; how many there were new.

    Args:
        files: by their names in the archive, each of the form ``compiler/<tag>/...``.
        cache: the compiler's folders.

    Raises:
        StoreError: the folder cannot be trusted, or a lock is held for too long.
        OSError: a file cannot be moved.
    """
    if not files:
        return 0
    folders = {tag: cache.folder_of(tag) for tag in {Path(name).parts[1] for name in files}}
    placed = 0
    with cache.locked():
        for name, path in files.items():
            _, tag, *inner = Path(name).parts
            target = folders[tag].joinpath(*inner)
            if not os.path.lexists(target):
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.replace(path, target)
                placed += 1
    return placed
