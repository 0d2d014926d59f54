"""What ``hotcompile explain`` has found out about a model, and the way through a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hotcompile.plan.compile_cost import expected_compile_s
from lightning_hotcompile.plan.forecast import expected_speedup
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.receipt.wording import milliseconds, seconds
from lightning_hotcompile.swap.tracing.breaks import GraphBreak


@dataclass(frozen=True, kw_only=True)
class RegionSeen:
    """What Dynamo made of one planned region in the first batch."""

    name: str
    kind: str
    members: tuple[str, ...]
    calls: int
    graphs: tuple[int, ...]
    """Operations of each captured graph."""

    error: str | None = None
    """Why there is no graph, or why it would stay eager."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan, and what the first batch showed of it.

    ``declined`` says why nothing would be compiled; ``failed`` why the first batch did not come to its end.
    """

    model: str
    scope: str = ""
    plan: str = ""
    declined: str | None = None
    forecast: str | None = None
    failed: str | None = None
    looked: bool = False
    """Whether a batch went through the planned regions."""

    regions: tuple[RegionSeen, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    errors: tuple[str, ...] = ()
    """What Dynamo could not compile, beside the graph breaks."""

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)


def explanation_from(text: str) -> Explanation:
    """The explanation that :meth:`Explanation.to_json` gave.

    Raises:
        ValueError: the text is not complete.
        TypeError: it holds something else.
    """
    record: dict[str, Any] = json.loads(text)
    regions = tuple(RegionSeen(**_tuples(r)) for r in record.pop("regions"))
    breaks = tuple(GraphBreak(**_tuples(b)) for b in record.pop("breaks"))
    return Explanation(**_tuples(record), regions=regions, breaks=breaks)


def _tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def outlook(regions: Sequence[Region], remaining_steps: int | None, *, on_cpu: bool) -> str:
    """What the forecast can say before a step was timed: from which step time on compiling pays.

    Args:
        regions: of the plan.
        remaining_steps: steps of the run, ``None`` if nothing limits them.
        on_cpu: whether the gain is taken to depend on the step time, as it was measured there.
    """
    cost = expected_compile_s(regions)
    words = f"compiling is taken to cost about {cost:.0f} s"
    if remaining_steps is None:
        return f"{words}; the length of the run is not known, so the run waits until it has taken as long"
    for step_s in _STEPS_S:
        gain = expected_speedup(regions, step_s if on_cpu else None)
        if remaining_steps * step_s * (1 - 1 / gain) > cost:
            least = milliseconds(1e3 * step_s) if step_s < 1 else seconds(step_s)
            return (
                f"{words}; with {remaining_steps:,} steps it pays if an eager step takes more than about "
                f"{least}, at an assumed speed-up of {gain:.2f}x"
            )
    return f"{words}; with {remaining_steps:,} steps it does not pay"


_STEPS_S = tuple(1e-5 * 1.02**k for k in range(815))
"""From 10 us to 100 s, two per cent apart."""
