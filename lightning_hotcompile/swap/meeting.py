"""Ranks meet in the key-value store of their process group, and nobody waits longer than a limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # a build of torch may have none
    from torch.distributed.distributed_c10d import Store

_FOLDER = "lightning_hotcompile"
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.1

Conclude = Callable[[Sequence["str | None"]], str]


class Meeting:
    """A place where each rank leaves a text and all take the same verdict away.

    Rank 0 waits for all texts and writes the verdict; the others wait for it. Who has waited too long
    writes it in place of rank 0, from the texts that are there. The store keeps the verdict that is
    written first, so a rank that comes late learns that the others went on without it. No collective
    runs: what the training has in flight is not touched, and its time limit does not count.

    Args:
        store: of the process group. Only what the last three meetings left stays in it.
        rank: number of this process, from 0.
        world_size: number of processes.
        now: a clock in seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._now = now
        self._pause = pause

    def hold(self, text: str, conclude: Conclude, limit_s: float) -> str:
        """Leave a text, wait, and take the verdict.

        Args:
            text: what this rank says.
            conclude: makes the verdict from the texts in order of rank, ``None`` for one that did not
                come. Not empty, and the same on each rank for the same texts.
            limit_s: seconds to wait for the others.

        Raises:
            RuntimeError: the store does not answer (its server has gone).
        """
        # Counted in the store, not here: no other callback or fit of these processes uses it twice.
        number = self._store.add(f"{_FOLDER}/meetings of rank {self._rank}", 1)
        self._store.set(self._text(number, self._rank), text)
        self._forget(number - 2)
        self._wait(number, limit_s)
        verdict = self._verdict(number)
        if self._store.check([verdict]):
            return self._store.get(verdict).decode()
        return self._store.compare_set(verdict, "", conclude(self._texts(number))).decode()

    def _wait(self, number: int, limit_s: float) -> None:
        """Asks again and again: a wait inside of the store could not be interrupted, nor have two ends."""
        until, pause = self._now() + limit_s, _FIRST_PAUSE_S
        while not self._is_over(number) and self._now() < until:
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _is_over(self, number: int) -> bool:
        return self._store.check([self._verdict(number)]) or (
            self._rank == 0 and self._store.check(self._all_texts(number))
        )

    def _texts(self, number: int) -> list[str | None]:
        keys = self._all_texts(number)
        if self._store.check(keys):
            return [text.decode() for text in self._store.multi_get(keys)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def _forget(self, number: int) -> None:
        """All ranks have been at the meeting after that one, so nobody reads it any longer."""
        if number > 0:
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                self._store.delete_key(self._text(number, self._rank))
                if self._rank == 0:
                    self._store.delete_key(self._verdict(number))

    def _all_texts(self, number: int) -> list[str]:
        return [self._text(number, rank) for rank in range(self._world_size)]

    @staticmethod
    def _text(number: int, rank: int) -> str:
        return f"{_FOLDER}/meeting {number}/rank {rank}"

    @staticmethod
    def _verdict(number: int) -> str:
        return f"{_FOLDER}/meeting {number}/verdict"


def store_of_processes() -> Store | None:
    """The key-value store of the default process group, by a connection of our own.

    ``None`` where a launcher made the group without one (MPI) or torch does not hand it out.
    """
    find = getattr(dist.group.WORLD, "get_group_store", None)
    if find is None or dist.get_backend() == dist.Backend.MPI:
        return None
    store: Any = find()
    # The first connection is shared with threads that watch the communicators.
    own: Store = store.clone()  # of which torch's stub does not know
    return own


def timeout_of(store: Any) -> float:
    """Seconds after which the process group gives up a collective, as it told its store."""
    seconds: float = store.timeout.total_seconds()  # of which torch's stub does not know
    return seconds
