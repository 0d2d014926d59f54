"""What can go wrong, by kind."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Iterable


class HotCompileError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(HotCompileError, ValueError):
    """An option has a value that is not allowed, or two options contradict each other."""


class TargetError(HotCompileError, LookupError):
    """A target names no module, function or optimizer that is there."""


class PlanError(HotCompileError):
    """What was asked for cannot be done with this model."""


class ParityError(HotCompileError):
    """Compiled code computes something else than eager, and ``parity="raise"`` was asked for."""


class HotCompileWarning(UserWarning):
    """Something was not done as asked; training goes on."""


def warn(message: str, stacklevel: int = 2) -> None:
    """Give a :class:`HotCompileWarning`; where warnings are errors, a log line: no training stops for it.

    ``stacklevel`` counts from the caller, as that of ``warnings.warn``.
    """
    try:
        warnings.warn(message, HotCompileWarning, stacklevel=stacklevel + 1)
    except HotCompileWarning:
        logging.getLogger(__name__).warning(message)


def first_line(error: BaseException) -> str:
    """An error as one line: its kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def near_names(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A hint for a misspelt name: ``"; did you mean 'a' or 'b'?"``, or nothing if none is near.

    >>> near_names("blocs", ["blocks", "head"])
    "; did you mean 'blocks'?"
    """
    matches = difflib.get_close_matches(name, sorted(set(known)), n=limit, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
