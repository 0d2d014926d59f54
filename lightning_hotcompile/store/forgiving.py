"""What a training asks of the disk never raises: it warns once and goes on without memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lightning_hotcompile.errors import warn
from lightning_hotcompile.store.checked import InvalidRecord, NewerFormat
from lightning_hotcompile.store.folder import SafeFolder, StoreBusy, StoreError

_LEFT_OVER_S = 3600.0

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Forgiving:
    """Reads and writes in the store's folder that only warn.

    Args:
        folder: the store's folder.
        now: the clock, seconds since 1970.
    """

    def __init__(self, folder: SafeFolder, now: Callable[[], float]) -> None:
        self._folder = folder
        self._now = now
        self._warned: set[str] = set()

    def attempt(self, what: str, action: Callable[[], Result], *, lock: str) -> Result | None:
        """What ``action`` gives with the lock held, and ``None`` where it could not be done.

        An error of the disk is told, and once that it has no locks; a lock that another process holds is only
        a note for debugging, for the next run writes again. What killed processes left is removed before.
        """
        try:
            with self._folder.locked(lock):
                self._folder.sweep(self._now() - _LEFT_OVER_S)
                return action()
        except StoreBusy as error:
            _log.debug("%s not kept: %s", what, error)
        except NewerFormat as error:
            _log.debug("%s not kept, it would replace what a newer version wrote: %s", what, error)
        except (OSError, StoreError) as error:
            self.warn_once(f"the store {str(self._folder.path)!r} could not keep a {what}: {error}")
        return None

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """The body; a file that is missing, damaged or not ours ends it.

        Raises:
            NewerFormat: a later version of the package wrote the file.
        """
        try:
            yield
        except FileNotFoundError:
            pass
        except NewerFormat as error:
            raise NewerFormat(f"{path} is not used: {error}.") from None
        except (OSError, InvalidRecord) as error:
            self.warn_once(f"{path} is not used and will be written anew: {error}.")

    @contextlib.contextmanager
    def ignoring_newer(self) -> Iterator[None]:
        """The body; a file that a later version wrote ends it with a warning."""
        try:
            yield
        except NewerFormat as error:
            self.warn_once(str(error))

    def warn_once(self, message: str) -> None:
        """Warn, but not a second time with the same words."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)
