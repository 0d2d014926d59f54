"""Whether the first steps take memory from the system anew; that is ended, and told."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from lightning_hotcompile.swap.process import heap

MANY = 64
"""Page faults of a step, 256 KiB of it, that are worth ending: 0.1 to 0.2 ms on a virtual machine."""

LEFT_OUT_AT_START = 1
"""First steps, in which memory is touched for the first time."""

LEFT_OUT_AFTER_CHANGE = 2
"""Steps after the change, for the same reason."""

COUNTED = 3
"""Steps that have to have so many on average."""


class HeapWatch:
    """Counts the page faults of a few steps at the beginning of a training on a CPU.

    Args:
        device: type of the device that trains.
        wanted: whether anything may be changed; else nothing is counted.
    """

    def __init__(self, device: str, *, wanted: bool) -> None:
        self.is_watching = wanted and device == "cpu" and heap.why_not_kept() is None
        self.before: int | None = None
        """Page faults of a step, where there were many and glibc was told to keep what is freed."""

        self.after: int | None = None
        """The same from then on."""

        self._at_start: int | None = None
        self._to_skip = LEFT_OUT_AT_START
        self._counts: list[int] = []

    @property
    def is_deciding(self) -> bool:
        """Whether the page faults of the next steps say if anything is changed."""
        return self.is_watching and self.before is None

    def begin_step(self) -> None:
        """A step begins."""
        self._at_start = heap.page_faults() if self.is_watching else None

    def end_step(self, *, disturbed: bool) -> bool:
        """A step has ended; whether glibc was told to keep what is freed, since steps had many faults.

        Args:
            disturbed: whether it was compiled or recorded in this step, which takes memory of its own.
        """
        start, self._at_start = self._at_start, None
        if start is None or disturbed:
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._counts.append(heap.page_faults() - start)
        return len(self._counts) == COUNTED and self._decide()

    def _decide(self) -> bool:
        counts, self._counts = self._counts, []
        if self.before is not None:
            self.after = round(fmean(counts))
        if self.before is not None or fmean(counts) < MANY or not heap.keep_freed_memory():
            self.is_watching = False
            return False
        self.before, self._to_skip = round(fmean(counts)), LEFT_OUT_AFTER_CHANGE
        return True

    def in_words(self) -> Iterator[str]:
        """What was found, for a receipt."""
        if self.before is None:
            return
        kept = "glibc was told to keep freed blocks of less than 32 MiB until the process ends"
        text = f"steps took memory from the system anew, {self.before:,} page faults each; {kept}"
        if self.after is None:
            yield text
            return
        yield f"{text}: {self.after:,} page faults a step"
        if self.after >= MANY:
            yield (
                f"{self.after:,} page faults a step are left: of blocks above 32 MiB, say, or of batches in "
                "shared memory. A script that is started with MALLOC_MMAP_THRESHOLD_=1073741824 and "
                "MALLOC_TRIM_THRESHOLD_=2147483648 keeps larger blocks too"
            )
