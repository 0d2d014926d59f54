"""How compiled code compares with eager where both were run with the same random seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hotcompile.swap.parity.difference import Run


@dataclass(frozen=True, kw_only=True)
class Strict:
    """The findings of one such comparison.

    ``needed``, ``uncounted`` and ``sharing`` are positions, as in
    :class:`~lightning_hotcompile.swap.parity.verdict.Parity`.
    """

    difference: float
    """The largest absolute one of an output, a gradient or an input."""

    share: float
    """The largest difference as a share of the tensor that it is in; 0 where that decides nothing."""

    kinds: bool
    """Whether there are as many outputs and gradients as in eager, of the same shapes and types."""

    agrees: bool
    uncertain: bool
    """Whether it agrees only as far as eager does with itself where inputs differ in the last digit."""

    as_many: bool
    """Whether as many random numbers were drawn; also true where they cannot be counted."""

    needed: tuple[int, ...]
    uncounted: tuple[int, ...]
    spoiled: bool
    """Whether it writes to an input that its backward needs, and eager's needs it after the write or not at
    all."""

    sharing: tuple[int, ...]

    @property
    def why_not(self) -> str:
        """Why it does not agree, in words."""
        if not self.kinds:
            return "has outputs or gradients of other shapes or types than eager, or more or fewer of them"
        share = f", {self.share:.0%} of a tensor's size" if math.isfinite(self.share) and self.share else ""
        return f"differs from eager by up to {self.difference:.3g}{share}"


def is_spoiled(first: Run, result: Run) -> bool:
    """See :attr:`Strict.spoiled`.

    AOTAutograd saves an input as it was before the run, and writes to it at the end of the run.
    """
    written = [i for i in result.saved if i in result.changed]
    return any(i in first.changed or i not in first.saved for i in written)
