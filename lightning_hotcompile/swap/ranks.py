"""All ranks change together, or none does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from lightning_hotcompile.swap.meeting import Meeting, store_of_processes, timeout_of
from lightning_hotcompile.swap.tracing.signal_handlers import comes_from_a_handler


def has_other_ranks() -> bool:
    """Whether this process is one of several that call collectives together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


LONGEST_WAIT_S = 120.0
"""So many seconds a rank waits for the others, unless collectives of this run give up earlier."""

_PART_OF_TIMEOUT = 1 / 3
_ENDS = ("declined", "reverted")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank would do now: the phase it wants to be in, why, and under which plan.

    ``without_all`` is the phase that it ends in if one rank does not answer.
    """

    rank: int
    phase: str
    reason: str
    plan_digest: str
    without_all: str = "declined"


def agree(proposals: Sequence[Proposal], current: str) -> Proposal | None:
    """What all ranks do, the same on each; ``None`` means that all wait.

    One rank that declines or takes back decides for all: a rank that compiles alone makes the
    others wait in their collectives until they time out. Different plans are a decline. One rank that
    lets a child process compile first makes all wait for it.
    """
    for end in _ENDS:
        for proposal in proposals:
            if proposal.phase == end != current:
                return replace(proposal, reason=f"rank {proposal.rank}: {proposal.reason}")
    wanted = {p.phase for p in proposals}
    if wanted == {"prewarming", "flipping"} and current != "prewarming":
        wanted = {"prewarming"}
    if wanted == {current} or len(wanted) > 1:
        return None
    first = next(p for p in proposals if p.phase in wanted)
    other = next((p for p in proposals if p.plan_digest != first.plan_digest), None)
    if other is not None:
        reason = (
            f"the ranks made different plans: {first.plan_digest} on rank {first.rank}, "
            f"{other.plan_digest} on rank {other.rank}; give the same model and options to all"
        )
        return replace(first, phase="declined", reason=reason)
    return first


class Ranks:
    """The processes that train together.

    They exchange proposals at steps that all of them can tell from their own counters: while
    observing at every ``interval``-th batch, while flipping at each batch, while prewarming and settling
    at every tenth. In an end state nothing is exchanged. ``world_size`` is 1 without a process group.

    Args:
        interval: batches between two exchanges while observing.
        limit_s: seconds to wait for the others; ``None`` for the smaller of two minutes and a third
            of the process group's own limit.
        meeting: where the ranks meet; ``None`` for the store of the process group.
        alone: train as one process, also inside of somebody's process group.
    """

    def __init__(
        self,
        interval: int = 10,
        *,
        limit_s: float | None = None,
        meeting: Meeting | None = None,
        alone: bool = False,
    ) -> None:
        self._interval = max(1, interval)
        self._limit_s = limit_s
        self._meeting = meeting
        initialized = not alone and dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if initialized else 1
        self.timeout_s: float | None = None
        """Seconds after which a collective of this run gives up; ``None`` if that is not known."""
        if self.world_size > 1 and meeting is None:
            self._find_store()

    def _find_store(self) -> None:
        store = store_of_processes()
        if store is not None:
            self.timeout_s = timeout_of(store)
            self._meeting = Meeting(store, self.rank, self.world_size)

    def within_timeout(self, seconds: float | None) -> float | None:
        """At most half of what a collective waits, so that the other ranks are still there."""
        if self.timeout_s is None:
            return seconds
        return self.timeout_s / 2 if seconds is None else min(seconds, self.timeout_s / 2)

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return dist.get_rank() if self.world_size > 1 else 0

    @property
    def limit_s(self) -> float:
        """Seconds to wait for the others: meanwhile none of them should give up a collective."""
        if self._limit_s is not None:
            return self._limit_s
        return min(LONGEST_WAIT_S, self.timeout_s * _PART_OF_TIMEOUT if self.timeout_s else LONGEST_WAIT_S)

    def is_due(self, phase: str, batches_seen: int) -> bool:
        """Whether all ranks exchange proposals before this batch."""
        if phase == "flipping":
            return True
        if phase == "observing":
            return batches_seen % self._interval == 0
        return phase in ("prewarming", "settling") and batches_seen % 10 == 0

    def agree_to_watch(self, plan_digest: str, reason: str | None) -> str | None:
        """Before the first step: why this run is not watched, on any rank; ``None`` if it is on all.

        A rank that stands aside calls this too: it would leave the others waiting.
        """
        if self.world_size == 1:
            return reason
        ours = Proposal(
            rank=self.rank,
            phase="watching" if reason is None else "declined",
            reason=reason or "",
            plan_digest=f"{plan_digest}, a look every {self._interval} batches",
        )
        agreed = agree(self.exchange(ours), current="")
        return agreed.reason if agreed is not None and agreed.phase == "declined" else reason

    def exchange(self, proposal: Proposal, limit_s: float | None = None) -> list[Proposal]:
        """The proposals of all ranks, in order of rank; of equal ones only the first.

        Each rank has to call it. One that does not do so within ``limit_s`` seconds (as a rule
        :attr:`limit_s`) is given the proposal to end, and learns that when it comes. Where the
        process group has no store this is a collective, with the time limit of the group.
        """
        if self.world_size == 1:
            return [proposal]
        if self._meeting is None:
            found: list[Proposal | None] = [None] * self.world_size
            dist.all_gather_object(found, proposal)
            return [p for p in found if p is not None]
        limit_s = self.limit_s if limit_s is None else limit_s
        try:
            verdict = self._meeting.hold(
                _written([proposal]), lambda texts: _conclude(proposal, texts, limit_s), limit_s
            )
        except RuntimeError as error:
            if comes_from_a_handler(error):
                raise
            reason = f"the store of the process group does not answer: {str(error).partition(chr(10))[0]}"
            return [replace(proposal, phase=proposal.without_all, reason=reason)]
        return _read(verdict)


def _conclude(ours: Proposal, texts: Sequence[str | None], limit_s: float) -> str:
    """One proposal of each kind, since many ranks read this; or the end, if some rank is missing."""
    missing = [rank for rank, text in enumerate(texts) if text is None]
    if missing:
        others = f", nor did rank {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
        reason = f"did not answer within {limit_s:g} s{others}"
        return _written([replace(ours, rank=missing[0], phase=ours.without_all, reason=reason)])
    kinds: dict[tuple[str, str], Proposal] = {}
    for text in texts:
        for proposal in _read(text or "[]"):
            kinds.setdefault((proposal.phase, proposal.plan_digest), proposal)
    return _written(list(kinds.values()))


def _written(proposals: Sequence[Proposal]) -> str:
    return json.dumps([asdict(p) for p in proposals])


def _read(text: str) -> list[Proposal]:
    return [Proposal(**fields) for fields in json.loads(text)]
