"""All ranks change together, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

_ENDS = ("declined", "reverted")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank would do now: the phase it wants to be in, why, and under which plan."""

    rank: int
    phase: str
    reason: str
    plan_digest: str


def agree(proposals: Sequence[Proposal], current: str) -> Proposal | None:
    """What all ranks do, the same on each; ``None`` means that all wait.

    One rank that declines or takes back decides for all: a rank that compiles alone makes the
    others wait in their collectives until they time out. Different plans are a decline.
    """
    for end in _ENDS:
        for proposal in proposals:
            if proposal.phase == end != current:
                return replace(proposal, reason=f"rank {proposal.rank}: {proposal.reason}")
    wanted = {p.phase for p in proposals}
    if wanted == {current} or len(wanted) > 1:
        return None
    first = proposals[0]
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
    observing at every ``interval``-th batch, while flipping at each batch, while settling at every
    tenth. In an end state nothing is exchanged. ``world_size`` is 1 without a process group.
    """

    def __init__(self, interval: int = 10) -> None:
        self._interval = max(1, interval)
        self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return dist.get_rank() if self.world_size > 1 else 0

    def is_due(self, phase: str, batches_seen: int) -> bool:
        """Whether all ranks exchange proposals before this batch."""
        if phase == "flipping":
            return True
        if phase in ("observing", "settling"):
            every = 10 if phase == "settling" else self._interval
            return batches_seen % every == 0
        return False

    def agree_to_watch(self, plan_digest: str, reason: str | None) -> str | None:
        """Before the first step: why this run is not watched, on any rank; ``None`` if it is on all.

        A collective, also for a rank that stands aside: it would leave the others waiting later.
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

    def exchange(self, proposal: Proposal) -> list[Proposal]:
        """The proposals of all ranks, in order of rank. A collective: each rank has to call it."""
        if self.world_size == 1:
            return [proposal]
        found: list[Proposal | None] = [None] * self.world_size
        dist.all_gather_object(found, proposal)
        return [p for p in found if p is not None]
