"""What Dynamo has noted on the compiles of late: of which piece of code each was, and why it was needed."""

from __future__ import annotations

from typing import Any

from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext

_LATE = 8
"""Compiles among which the latest that was no first one is looked for."""


def running_compile() -> str | None:
    """Which compile this thread is at: ``3/1`` is the second one of the piece of code with number 3."""
    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def code_of(compile_id: object) -> str:
    """The number of the piece of code that was compiled."""
    return str(compile_id).partition("/")[0]


def past_compiles() -> list[Any]:
    """What Dynamo has noted on each of the last compiles, oldest first."""
    return list(get_compilation_metrics())


def reason_of(noted: Any) -> str | None:
    """Why one of them was needed, the first guard that failed; ``None`` for the first one of a code."""
    reason: str | None = noted.recompile_reason
    return reason.strip().splitlines()[0] if reason else None


def reason_for(compile_id: str | None) -> str | None:
    """The same by its number; ``None`` if it is not known, or no longer."""
    of_it = (noted for noted in reversed(past_compiles()) if compile_id and noted.compile_id == compile_id)
    return next(map(reason_of, of_it), None)


def latest_reason() -> str | None:
    """Why a piece of code was compiled again, the latest of the last compiles that was no first one."""
    return next(filter(None, map(reason_of, reversed(past_compiles()[-_LATE:]))), None)
