"""Patches of torch: attributes of its modules and classes, replaced for a while and then put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

_INHERITED = object()
"""Stands for an attribute that the owner did not have itself, but from its base class."""


def put_in_place(ours: Mapping[tuple[Any, str], Any]) -> Callable[[], None]:
    """Set attributes, given by owner (module, class or instance) and name; returns what puts them back.

    An attribute that somebody else has set since then is left alone.
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
    """A patch that counts its users, in all threads: applied for the first one, undone after the last one.

    Args:
        replace: applies the patch; returns what undoes it, ``None`` where this version of torch has
            nothing to patch.
    """

    def __init__(self, replace: Callable[[], Callable[[], None] | None]) -> None:
        self._replace = replace
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None] | None = None

    @property
    def is_made(self) -> bool:
        """Whether the patch is applied now."""
        return self._undo is not None

    def enter(self) -> None:
        """Count one more user; the first one applies the patch."""
        with self._lock:
            if self._undo is None:
                self._undo = self._replace()
            self._users += 1

    def leave(self) -> None:
        """Count one user less; the last one undoes the patch."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None


class Replaces:
    """A user of a patch, as a context: the base of classes that each name their patch in ``replacement``.

    Entering the same object twice counts once.
    """

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
