"""What compiled code and eager said of each other with the same random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hotcompile.swap.parity.difference import Run


@dataclass(frozen=True, kw_only=True)
class Strict:
    """What a run with the same seed said.

    Tuples are as in :class:`~lightning_hotcompile.swap.parity.verdict.Parity`.
    """

    difference: float
    share: float
    """The largest difference as a share of the tensor that it is in; 0 where that decides nothing."""

    kinds: bool
    agrees: bool
    uncertain: bool
    """Whether it does only as far as eager agrees with itself where inputs differ in the last digit."""

    as_many: bool
    needed: tuple[int, ...]
    uncounted: tuple[int, ...]
    spoiled: bool
    """Whether it writes to an input that its backward needs, and eager's needs it after the write or not at
    all."""

    sharing: tuple[int, ...]

    @property
    def why_not(self) -> str:
        """In words."""
        if not self.kinds:
            return "has outputs or gradients of other shapes than eager, or more or fewer of them"
        share = f", {self.share:.0%} of a tensor's size" if math.isfinite(self.share) and self.share else ""
        return f"differs from eager by up to {self.difference:.3g}{share}"


def is_spoiled(first: Run, result: Run) -> bool:
    """See :attr:`Strict.spoiled`.

    AOTAutograd saves an input as it was before the run, and writes to it at the end of the run.
    """
    written = [i for i in result.saved if i in result.changed]
    return any(i in first.changed or i not in first.saved for i in written)
