"""A way of torch's that is replaced while anybody wants that, in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

_INHERITED = object()
"""Stands for what a class has of its base."""


def put_in_place(ours: Mapping[tuple[Any, str], Any]) -> Callable[[], None]:
    """Set attributes by owner (module, class or instance) and name; returns what undoes it, last one first.

    What somebody else has put there since stays.
    """
    theirs = {(owner, name): vars(owner).get(name, _INHERITED) for owner, name in ours}
    for (owner, name), value in ours.items():
        setattr(owner, name, value)

    def undo() -> None:
        for (owner, name), before in reversed(theirs.items()):
            if vars(owner).get(name) is not ours[owner, name]:
                continue
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return undo


class Replacement:
    """Made for the first who wants it, undone after the last.

    Args:
        replace: makes it; returns what undoes it, ``None`` where this torch does it in another way.
    """

    def __init__(self, replace: Callable[[], Callable[[], None] | None]) -> None:
        self._replace = replace
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None] | None = None

    @property
    def is_made(self) -> bool:
        """Whether anybody wants it now."""
        return self._undo is not None

    def enter(self) -> None:
        """One more wants it."""
        with self._lock:
            if self._undo is None:
                self._undo = self._replace()
            self._users += 1

    def leave(self) -> None:
        """One wants it no longer."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None


class Replaces:
    """While any of a class is entered, its replacement is there; entering one twice does nothing."""

    replacement: ClassVar[Replacement]

    def __init__(self) -> None:
        self._is_entered = False

    def __enter__(self) -> None:
        if not self._is_entered:
            self.replacement.enter()
            self._is_entered = True

    def __exit__(self, *_: object) -> None:
        if self._is_entered:
            self._is_entered = False
            self.replacement.leave()
