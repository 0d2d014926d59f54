"""Graph breaks as Dynamo tells them to its own log: what, why, and where in the user's code.

``torch._dynamo.explain`` counts only breaks after which a graph was made. The log has those too that
cost a whole function, such as one inside of a loop.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from lightning_hotcompile.swap.own_thread import OwnThread
from lightning_hotcompile.swap.replaced import Replacement, Replaces

LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"

_PLACE = re.compile(r"Graph break in user code at (?P<file>.+):(?P<line>\d+)")
_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n    (?P<code>.+)$', re.M
)
_ENDS = ("\n\nStack variable source attribution:", "\n\nUser code traceback:")
_LOST = ("Skipping the function", "Skipping the frame")
_SWITCHED_OFF = re.compile(r"with `torch\.compiler\.disable` \(reason: (?P<why>.+)\)$")
_NO_ADVICE = "Please report an issue to PyTorch."
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


@dataclass(frozen=True, kw_only=True)
class GraphBreak:
    """One place at which Dynamo ends a graph."""

    reason: str
    file: str
    line: int
    """Of the innermost frame that belongs neither to torch nor to this package."""

    function: str = ""
    code: str = ""
    explanation: str = ""
    hints: tuple[str, ...] = ()
    loses_function: bool = False
    """Whether the whole function runs eagerly, and not only what follows is a graph of its own."""

    @property
    def place(self) -> str:
        """File and line, and the function that it is in."""
        shown = Path(self.file)
        with contextlib.suppress(ValueError, OSError):  # it is elsewhere, or the working folder is gone
            shown = shown.relative_to(Path.cwd())
        return f"{shown}:{self.line}" + (f" in {self.function}" if self.function else "")

    @property
    def consequence(self) -> str:
        """Why the graph ends, and what that costs."""
        lost = "; the function, or its part after an earlier break, runs eagerly"
        return self.reason + lost * self.loses_function

    def __str__(self) -> str:
        line = f" ({self.code})" if self.code else ""
        return f"graph break at {self.place}{line}: {self.consequence}"


@contextlib.contextmanager
def graph_breaks_told(to: Callable[[GraphBreak], None]) -> Iterator[None]:
    """Hands on each graph break of this thread while it lasts; one place where it breaks twice is told once.

    To who has asked torch for this log (``TORCH_LOGS=graph_breaks``) it goes as before.
    """
    logger, listener = logging.getLogger(LOGGER), _Listener(to)
    logger.addHandler(listener)
    try:
        with _AllAreTold():
            yield
    finally:
        logger.removeHandler(listener)


def _tell_all() -> Callable[[], None]:
    logger = logging.getLogger(LOGGER)
    goes_on = logger.propagate and logger.isEnabledFor(logging.DEBUG)
    with contextlib.ExitStack() as undo:
        undo.enter_context(
            patch.object(logger, "isEnabledFor", lambda level: True)
        )  # after logging.disable, too
        undo.enter_context(patch.object(logger, "propagate", goes_on))
        return undo.pop_all().close


class _AllAreTold(Replaces):
    """While any is entered, Dynamo logs graph breaks whatever the levels of its loggers are."""

    replacement = Replacement(_tell_all)


class _Listener(logging.Handler):
    def __init__(self, to: Callable[[GraphBreak], None]) -> None:
        super().__init__(logging.DEBUG)
        self._to = to
        self._thread = OwnThread()

    def emit(self, record: logging.LogRecord) -> None:
        found = break_from(record.getMessage()) if self._thread.is_here() else None
        if found is not None:
            self._to(found)


def break_from(message: str) -> GraphBreak | None:
    """The graph break of one message of Dynamo's log; None of a message that repeats an earlier one."""
    place = _PLACE.match(message)
    if place is None:
        return None
    told = message.partition("Graph Break Reason: ")[2]
    for end in _ENDS:
        told = told.partition(end)[0]
    lines = next(filter(None, map(_lines_of_reason, told.split("\n\n"))), ["not told"])
    frame = _users_frame(message.partition("User code traceback:\n")[2])
    explanation = " ".join(_after("Explanation:", lines))
    why = _why_switched_off(explanation)
    return GraphBreak(
        reason=lines[0] if why is None else f"not compiled: {why}",
        file=frame["file"] if frame else place["file"],
        line=int(frame["line"] if frame else place["line"]),
        function=frame["function"] if frame else "",
        code=frame["code"].strip() if frame else "",
        explanation=explanation,
        hints=tuple(hint for hint in _after("Hint:", lines) if hint != _NO_ADVICE and why is None),
        loses_function=any(words in told for words in _LOST),
    )


def _why_switched_off(explanation: str) -> str | None:
    """What ``torch.compiler.disable`` was given as its reason: by us of an island, say, or by the user."""
    found = _SWITCHED_OFF.search(explanation)
    return None if found is None or found["why"] == str(None) else found["why"]


def place_of(error: BaseException) -> str:
    """The user's line at which Dynamo failed with this error, to stand behind it; empty if not told."""
    frames = getattr(error, "real_stack", None) or ()
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    file, line, function, code = own[-1].filename, own[-1].lineno or 0, own[-1].name, own[-1].line
    found = GraphBreak(reason="", file=file, line=line, function=function)
    return f" at {found.place}" + (f" ({code})" if code else "")


def _lines_of_reason(paragraph: str) -> list[str]:
    """The lines of the paragraph that names the reason; none of one that leads up to it."""
    lines = [line.strip() for line in paragraph.strip().splitlines()]
    return [] if not lines or lines[0].endswith((":", ": ***")) else lines


def _after(title: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(title).strip() for line in lines if line.startswith(title)]


def _users_frame(traceback: str) -> re.Match[str] | None:
    frames: list[re.Match[str] | None] = list(_FRAME.finditer(traceback))
    own = [f for f in frames if f is not None and not f["file"].startswith(_NOT_THE_USERS)]
    return (own or frames or [None])[-1]
