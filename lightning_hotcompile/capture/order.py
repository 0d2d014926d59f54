"""What to capture; goes to the script's process in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lightning_hotcompile.errors import ConfigError

VARIABLE = "HOTCOMPILE_CAPTURE"

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json"
REPORT_FILE = "report.json"
EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which steps the profiler looks at, and where it writes; either ``steps`` or ``seconds`` is given."""

    folder: str
    """An absolute path: the script may change its working folder."""

    steps: int | None = None
    seconds: float | None = None
    skip: int = 0
    """Steps before the first one that counts."""

    after_decision: bool = False
    """Steps count only once HotCompile has come to its decision."""

    command: tuple[str, ...] = ()

    def to_text(self) -> str:
        """As the variable holds it."""
        return json.dumps(asdict(self))


def order_from(environment: Mapping[str, str]) -> Order | None:
    """The order in the variable, or None if there is none.

    Raises:
        ConfigError: the variable holds something else.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        record = json.loads(text)
        return Order(**{**record, "command": tuple(record["command"])})
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{VARIABLE}={text!r} is not allowed: python -m lightning_hotcompile.trace sets it, unset it."
        ) from None


class Window:
    """Tells when the profiler is to look; a step is one batch of training.

    Args:
        order: what was asked for.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._skip = order.skip
        self._opened: float | None = None
        self._steps = 0
        self.is_over = False

    @property
    def is_open(self) -> bool:
        """Whether the profiler looks now."""
        return self._opened is not None and not self.is_over

    def opens(self, now: float, *, decided: bool) -> bool:
        """Asked before each step: whether the profiler begins with it; ``now`` in seconds."""
        if self._opened is not None or (self._order.after_decision and not decided):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._opened = now
        return True

    def closes(self, now: float) -> bool:
        """Told after each step: whether that was the last one for the profiler."""
        if self._opened is None or self.is_over:
            return False
        self._steps += 1
        order, since = self._order, now - self._opened
        enough = order.steps is not None and self._steps >= order.steps
        self.is_over = enough or (order.seconds is not None and since >= order.seconds)
        return self.is_over
