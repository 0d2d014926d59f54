"""The control groups that this process is in: containers and batch systems limit what it may take by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_FILE = (OSError, ValueError, IndexError)


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """One group, as its folder tells.

    Args:
        folder: where the kernel shows it.
        unified: whether it is one of version 2.
    """

    folder: Path
    unified: bool

    def memory_left(self) -> int | None:
        """Bytes that it may still take, its file cache counted as free; ``None`` without a limit."""
        limit, used, cache = _MEMORY[self.unified]
        try:
            left = int(self._text(limit)) - int(self._text(used))
            stat = dict(line.split() for line in self._text("memory.stat").splitlines())
            return max(0, left + int(stat.get(cache, 0)))
        except _NO_FILE:
            return None  # no such group, or no limit ("max")

    def cores(self) -> float | None:
        """Seconds of processor time per second that it may take; ``None`` without a limit."""
        try:
            if self.unified:
                quota, period = map(int, self._text("cpu.max").split())
            else:
                quota, period = int(self._text("cpu.cfs_quota_us")), int(self._text("cpu.cfs_period_us"))
        except _NO_FILE:
            return None
        return quota / period if quota > 0 and period > 0 else None

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text()


_MEMORY = {
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    True: ("memory.max", "memory.current", "inactive_file"),
}


def groups_of(controller: str, root: Path) -> Iterator[ControlGroup]:
    """The groups that may limit this process, from its own to the one at the top, of versions 1 and 2.

    A batch system limits the job, and its steps and tasks are groups below. In a container the folder at the
    top is its own one, and the path that the kernel names need not be there.

    Args:
        controller: ``memory`` or ``cpu``.
        root: of the file system.
    """
    mounts = root / "sys/fs/cgroup"
    places = {True: (mounts, mounts / "unified"), False: (mounts / controller,)}
    paths = {True: PurePosixPath("/"), False: PurePosixPath("/")}
    for controllers, path in _memberships(root):
        if not controllers:
            paths[True] = path
        elif controller in controllers.split(","):
            places[False] = (mounts / controllers, mounts / controller)
            paths[False] = path
    for unified, path in paths.items():
        for place in dict.fromkeys(places[unified]):
            for inner in (path, *path.parents):
                yield ControlGroup(folder=place / inner.relative_to("/"), unified=unified)


def _memberships(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Controllers, separated by commas and none for version 2, and the path of the group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = PurePosixPath(path)
        if group.is_absolute() and ".." not in group.parts:  # which begin with that outside of the namespace
            yield controllers, group
