"""Python numbers that a step changes and Dynamo takes for constants: each step would be compiled anew.

Dynamo takes a number as an input once it has changed. What the step itself makes of it and keeps
(``self.beta *= 0.99``) it computes while it traces, and guards on the result; an optimizer's settings it
never takes as inputs. Up to Dynamo's limit of 8 that is a compile in each step.
"""

from __future__ import annotations

import re
from collections import Counter

from lightning_hotcompile.swap.dynamo import first_reason, recent_compiles

_EQUALS = re.compile(r"(?P<what>.+) == -?\d+(\.\d|e-)")

_MOST = 2
"""Compiles for one more value of the same number, after which there will be others. Not of an integer: what
counts or is drawn may have a few values only, each with code of its own.
"""


class MovingNumbers:
    """Counts, for each region, the compiles whose reason was another value of the same number."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._found: dict[str, str] = {}
        self._last = self._newest()

    def begin(self) -> None:
        """A call begins that may compile."""
        self._last = self._newest()

    def end(self, region: str) -> None:
        """It has ended: look at what was compiled, and why."""
        for compile_ in reversed(recent_compiles()):
            if compile_ is self._last:
                break
            if (reason := first_reason(compile_)) is not None:
                # "3/1" is the second compile of one piece of code; a step with graph breaks has several
                self.count(region, str(compile_.compile_id).partition("/")[0], reason)

    def count(self, region: str, frame: str, reason: str) -> None:
        """One more compile of a piece of the region's code, and its reason."""
        if (found := _EQUALS.search(reason)) is None:
            return
        what = found["what"].split(": ")[-1]
        self._counts[region, frame, what] += 1
        if self._counts[region, frame, what] >= _MOST:
            self._found[region] = what

    def why_not_again(self, region: str) -> str | None:
        """Why no more is to be compiled for a region, or ``None``."""
        what = self._found.get(region)
        return None if what is None else f"a number that is a constant of the code changes each step: {what}"

    @staticmethod
    def _newest() -> object:
        return next(reversed(recent_compiles()), None)
