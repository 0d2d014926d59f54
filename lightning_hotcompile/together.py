"""What the ranks of one run have agreed on, and how they get there."""

from __future__ import annotations

from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.swap.ranks import Proposal, Ranks, agree


class Together:
    """One agreed state for all ranks.

    When they exchange proposals depends only on what they agreed on before, never on what one of
    them has seen.

    Args:
        ranks: the processes.
        plan_digest: of this rank's plan.
    """

    def __init__(self, ranks: Ranks, plan_digest: str) -> None:
        self._ranks = ranks
        self._plan_digest = plan_digest
        self._exchanged_at = -1
        self._compiling = False
        self._state = State()
        self.several = ranks.world_size > 1
        """Whether there is more than one rank."""

        self.has_settled = False
        """Whether several ranks have come to an end: what they did not compile then they never will."""

    @property
    def state(self) -> State:
        """What all ranks have agreed on."""
        return self._state

    @state.setter
    def state(self, agreed: State) -> None:
        self._state = agreed
        at_an_end = agreed.phase in (Phase.STEADY, Phase.DECLINED, Phase.REVERTED)
        self.has_settled = self.several and at_an_end

    @property
    def compiling(self) -> bool:
        """Whether all ranks have put the plan in place and were not heard since."""
        return self._compiling

    def is_due(self, steps: int) -> bool:
        """Whether proposals are exchanged before this batch, and were not yet."""
        return self._exchanged_at != steps and self._ranks.is_due(str(self.state.phase), steps)

    def begin_compile(self) -> None:
        """All ranks put the plan in place now, and exchange once more before this batch."""
        self._compiling = True

    def exchange(self, wanted: State, steps: int, *, compiled: bool = False) -> Proposal | None:
        """Tell what this rank wants; what all do now, ``None`` to wait.

        With ``compiled``, the ranks have just put the plan in place: they are waited for as long as in a
        collective, where a slow one would be waited for otherwise.
        """
        self._exchanged_at = steps
        self._compiling = False
        proposal = Proposal(
            rank=self._ranks.rank,
            phase=str(wanted.phase),
            reason=wanted.reason,
            plan_digest=self._plan_digest,
            without_all=str(self._end),
        )
        found = self._ranks.exchange(proposal, self._ranks.timeout_s if compiled else None)
        return agree(found, current=str(self.state.phase))

    @property
    def _end(self) -> Phase:
        return Phase.REVERTED if self.state.phase.uses_compiled_code else Phase.DECLINED

    def answer_for(self, reason: str, steps: int) -> None:
        """A rank that cannot go on tells the others, who would wait for it for ever."""
        if not self._compiling and not self.is_due(steps):
            return
        agreed = self.exchange(State(phase=self._end, reason=reason), steps)
        if agreed is not None:
            self.state = State(phase=Phase(agreed.phase), reason=agreed.reason)
