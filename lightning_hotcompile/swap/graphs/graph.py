"""What is known about one captured graph, and what the runs of all graphs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_hotcompile.swap.graphs.backward import Backwards
from lightning_hotcompile.swap.graphs.uncounted import HiddenWrites
from lightning_hotcompile.swap.parity.verdict import Parity


@dataclass(kw_only=True)
class Graph:
    """One captured graph: where it belongs, what it cost, how often it ran.

    ``seconds`` is the backend's own time, forward and backward. ``error`` is set if the backend
    failed, or if the compiled code turned out to be wrong or raised: then eager runs instead. ``cache_hit``
    tells whether Inductor found it in its cache, ``None`` if that is not known. ``parity`` is set by the
    first run; ``unwatched`` says why the runs after it are not looked at for NaN. ``compile_id`` is Dynamo's
    number of the compile that it was captured in.
    """

    region: str
    n_ops: int
    seconds: float = 0.0
    runs: int = 0
    error: str | None = None
    cache_hit: bool | None = None
    parity: Parity | None = None
    unwatched: str | None = None
    compile_id: str | None = None


@dataclass(kw_only=True)
class Watch:
    """What the runs of all graphs share: what to do about wrong code, and whether to look for it."""

    parity: str
    draws_as_eager: bool = False
    """Whether what the backend makes draws eager's random numbers."""

    backward_outside: bool = False
    """Whether backwards run outside of the autocast around the forward."""

    raise_errors: bool = False
    on_failure: Callable[[BaseException], None] = lambda error: None
    armed: bool = True
    """Whether runs that are still to be looked at for NaN are looked at now; that takes time."""

    hidden: HiddenWrites = field(default_factory=HiddenWrites)
    backwards: Backwards = field(default_factory=Backwards)
    total_runs: int = 0
    collected_runs: int = 0
    """Runs of graphs that are only collected, and run as captured; ``total_runs`` does not include them."""

    @property
    def runs_of_all_kinds(self) -> int:
        """Runs of graphs of either sort: where it grows during a call, the call ran a graph."""
        return self.total_runs + self.collected_runs
