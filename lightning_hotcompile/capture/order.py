"""What is to be done in the script's process, which is told by an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from lightning_hotcompile.errors import ConfigError

VARIABLE = "HOTCOMPILE_CAPTURE"
EXPLAIN_VARIABLE = "HOTCOMPILE_EXPLAIN"
WORTH_VARIABLE = "HOTCOMPILE_WORTH"

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json"
REPORT_FILE = "report.json"
EVENTS_FILE = "events.jsonl"
EXPLANATION_FILE = "explanation.json"
VERDICT_FILE = "verdict.json"

OrderT = TypeVar("OrderT", bound="_Order")


@dataclass(frozen=True, kw_only=True)
class _Order:
    variable: ClassVar[str]
    setter: ClassVar[str]
    """Who sets that variable."""

    folder: str
    """An absolute path: the script may change its working folder."""

    @classmethod
    def from_environment(cls: type[OrderT], environment: Mapping[str, str]) -> OrderT | None:
        """The order that the variable holds, or None if there is none.

        Raises:
            ConfigError: it holds something else.
        """
        text = environment.get(cls.variable, "").strip()
        if not text:
            return None
        try:
            record = json.loads(text).items()
            given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in record}
            return cls(**given)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"{cls.variable}={text!r} is not allowed: {cls.setter} sets it, unset it."
            ) from None

    def to_text(self) -> str:
        """As the variable holds it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Order(_Order):
    """Which steps the profiler looks at, and where it writes; either ``steps`` or ``seconds`` is given."""

    variable = VARIABLE
    setter = "python -m lightning_hotcompile.trace"

    steps: int | None = None
    seconds: float | None = None
    skip: int = 0
    """Steps before the first one that counts."""

    after_decision: bool = False
    """Steps count only once HotCompile has come to its decision."""

    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExplainOrder(_Order):
    """What to look at in the first batch, and where to write it."""

    variable = EXPLAIN_VARIABLE
    setter = "hotcompile explain"

    scope: str | None = None
    """Instead of the callback's own; None leaves that."""


@dataclass(frozen=True, kw_only=True)
class WorthOrder(_Order):
    """Until when to train, by which options, and where to write what came out."""

    variable = WORTH_VARIABLE
    setter = "hotcompile worth"

    max_seconds: float
    """Of training, counted from its first batch on."""

    max_steps: int | None = None
    scope: str | None = None
    backend: str | None = None
    """Instead of the callback's own; None leaves that."""


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
