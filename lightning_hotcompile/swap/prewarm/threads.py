"""A core for the child process where training uses all of them: one thread fewer while it compiles."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch


@functools.cache
def set_threads() -> Callable[[int], object]:
    """OpenMP's own ``omp_set_num_threads``, as PyTorch has loaded it; else ``torch.set_num_threads``.

    The latter tells MKL a number too, and with it a small GPT stays 12% slower for the rest of the process,
    even if the number is the one that there was.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads
        except (OSError, AttributeError):
            continue
    return torch.set_num_threads


class FewerThreads:
    """PyTorch's operations in this process use fewer threads from :meth:`begin` to :meth:`end`.

    Threads of OpenMP wait for each other by spinning. With as many as there are cores, a process beside
    them gets next to nothing, or makes each step many times as long.

    Args:
        threads: how many meanwhile; ``None`` = as many as there are, and nothing is changed.
    """

    _lent: ClassVar[list[FewerThreads]] = []

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._before: int | None = None

    @property
    def active(self) -> bool:
        """Whether there are fewer now."""
        return self._before is not None

    @classmethod
    def are_lent(cls) -> bool:
        """Whether there are fewer now in this process, for whichever child."""
        return bool(cls._lent)

    def begin(self) -> None:
        """From now on; a second call does nothing."""
        if self.threads is not None and not self.active:
            self._lent.append(self)
            self._before = torch.get_num_threads()
            set_threads()(self.threads)

    def end(self) -> None:
        """As many as before, unless somebody has chosen another number since; a second call does nothing."""
        before, self._before = self._before, None
        if self in self._lent:
            self._lent.remove(self)
        if before is not None and torch.get_num_threads() == self.threads:
            set_threads()(before)
