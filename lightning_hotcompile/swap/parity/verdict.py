"""What the comparison of one captured graph with eager said."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_hotcompile.swap.parity.reach import Reach


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What the comparison of one graph said.

    ``error`` is the largest absolute difference of an output, a gradient or a mutated input.
    ``stochastic`` graphs draw random numbers: if theirs are not those of eager, they are held against the
    noise between two eager runs, and strictly with the random numbers taken out.
    """

    agrees: bool | None
    """``None``: not compared, see ``reason``."""

    error: float | None = None
    stochastic: bool = False
    other_numbers: bool = False
    """Its random numbers are not those of eager: it was held against the noise."""

    reason: str = ""
    """Why it does not agree, or was not compared, or could be held against the noise only."""

    raised: bool = False
    """Compiled code raised: there is nothing of it to use."""

    changed: tuple[int, ...] = ()
    """Positions of the inputs that the graph changes in place."""

    changed_held: tuple[int, ...] = ()
    """Positions of the tensors that the graph holds by itself and changes."""

    late: tuple[int, ...] = ()
    """Of ``changed``, where eager is past the last tensor that it saves: a checkpoint that repeats the graph
    does not come to that."""

    needed: tuple[int, ...] = ()
    """Positions of inputs that the compiled backward needs as they were, and eager's does not; and of such
    outputs, as of :func:`~lightning_hotcompile.swap.parity.difference.of_output`."""

    uncounted: tuple[int, ...] = ()
    """Positions of inputs whose change compiled code counts, and eager does not: running statistics."""

    hidden: tuple[int, ...] = ()
    """Positions of inputs that eager's backward needs, and that a graph writes to through ``.data``: that of
    one call sees what later ones have written, where compiled code keeps what was there at each, or computes
    from it anew what eager has kept."""

    reach: Reach = field(default_factory=dict)
    """Inputs on which not all outputs depend, see :mod:`~lightning_hotcompile.swap.graphs.backward`."""

    apart: tuple[int, ...] = ()
    """Positions of inputs that want a gradient and that eager's backward does not come to."""

    several: bool = False
    """Whether more than one output has a gradient."""

    sharing: tuple[int, ...] = ()
    """Positions of inputs whose gradients, from compiled code, share the memory of another one."""

    @property
    def is_other_to_autograd(self) -> bool:
        """Whether compiled code has to be given a backward, and counts of changes, like those of eager."""
        return bool(self.reach or self.apart or self.sharing or self.uncounted)

    @property
    def failed(self) -> bool:
        """Whether it was compared and does not agree."""
        return self.agrees is False


def changes_what_is_held(parity: Parity | None, *, holds: bool) -> bool:
    """Whether a graph changes tensors that it holds by itself; any that it holds, if it was not compared."""
    compared = parity is not None and parity.agrees is not None
    return bool(parity.changed_held) if parity is not None and compared else holds
