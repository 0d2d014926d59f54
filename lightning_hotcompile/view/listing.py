"""Events as a listing, one instruction in each line."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence

from lightning_hotcompile.receipt.event_kinds import Event, Planned
from lightning_hotcompile.receipt.events import describe


def event_lines(log: Sequence[Event]) -> Iterator[str]:
    """Seconds since the first event, then the event; below a plan its tree.

    Stages other than training are named. Names of modules may hold anything: what would steer the
    terminal is shown as a question mark.
    """
    zero = next((e.time for e in log if math.isfinite(e.time)), 0.0)
    for event in log:
        since = f"+{event.time - zero:.3f}s" if math.isfinite(event.time) else "?"
        stage = "" if event.stage == "train" else f"  [{event.stage}]"
        yield harmless(f"{since:>12}  {describe(event)}{stage}")
        if isinstance(event, Planned):
            for line in event.tree.splitlines():
                yield harmless(f"{'':>12}  {line}".rstrip())


def harmless(line: str) -> str:
    """The line without control characters and broken code points."""
    return "".join("?" if unicodedata.category(c) in ("Cc", "Cs") else c for c in line)
