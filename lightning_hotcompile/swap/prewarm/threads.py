"""A core for the child process where training uses all of them: one thread fewer while it compiles."""

from __future__ import annotations

import torch


class FewerThreads:
    """PyTorch's operations in this process use fewer threads from :meth:`begin` to :meth:`end`.

    Threads of OpenMP wait for each other by spinning. With as many as there are cores, a process beside
    them gets next to nothing, or makes each step many times as long.

    Args:
        threads: how many meanwhile; ``None`` = as many as there are, and nothing is changed.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._before: int | None = None

    @property
    def active(self) -> bool:
        """Whether there are fewer now."""
        return self._before is not None

    def begin(self) -> None:
        """From now on; a second call does nothing."""
        if self.threads is not None and not self.active:
            self._before = torch.get_num_threads()
            torch.set_num_threads(self.threads)

    def end(self) -> None:
        """As many as before, unless somebody has chosen another number since; a second call does nothing."""
        before, self._before = self._before, None
        if before is not None and torch.get_num_threads() == self.threads:
            torch.set_num_threads(before)
