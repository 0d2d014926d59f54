"""One track per step signature: where it stands and what its steps did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.stats import has_first_arm
from lightning_hotcompile.watch.step_record import PairedUnits

SOON = 3
"""Steps after which it is known what a step takes: enough to tell a run that is too short for anything."""

_UNITS_THAT_MAY_COMPILE = 3
_MISSES_BEFORE_RECOMPILING = 3
_MAX_RECOMPILE_EPISODES = 4
_MAX_SETTLING_UNITS = 100


def _always() -> bool:
    return True


@dataclass(kw_only=True)
class Track:
    """The life of one step signature in one fit."""

    signature: StepSignature
    state: State = field(default_factory=State)
    hot: bool = False
    unit: Hashable = None
    """What a detector calls the last unit that such a step was a part of."""

    steps: int = 0
    attempts: int = 0
    """Steps since the flip that were to use compiled code."""

    compiled_steps: int = 0
    """Those of them in which compiled code ran."""

    ran_compiled: bool = False
    """Whether compiled code ran in the last step."""

    pairs: PairedUnits = field(default_factory=PairedUnits)
    """Eager and compiled units."""

    trial: PairedUnits = field(default_factory=PairedUnits)
    """Units without and with the part of the plan that is tried."""

    settling_units: int = 0
    looks: int = 0
    may_compile: int = 0
    """Units that still may compile."""

    is_compiling: bool = False
    """Whether a step of this unit was one that may."""

    misses: int = 0
    recompile_episodes: int = 0
    failure: str | None = None
    is_hopeless: bool = False
    """Whether it was declined since all that was left of the run was too short for anything."""

    asked_again_at: int = 0
    """Its step before which it is not asked again whether compiling pays."""

    is_unknown: bool = False
    """Whether no earlier run knows this signature, as far as it was asked."""

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can happen before its next step: nothing is asked about it yet, or now."""
        if self.state.phase is not Phase.OBSERVING:
            return False
        if self.hot:
            return self.steps < self.asked_again_at
        return self.is_unknown and self.steps != SOON

    @property
    def is_known_soon(self) -> bool:
        """Whether it is seen before this step how long a step takes, though it is not hot yet."""
        return self.steps == SOON and not self.hot and self.state.phase is Phase.OBSERVING

    @property
    def phase(self) -> Phase:
        """The phase this signature is in."""
        return self.state.phase

    def lane(self) -> Lane:
        """Which way the next step of this signature goes, when something is installed.

        While settling, eager and compiled units alternate, in an order without a period: batches that
        alternate as well would else all meet the same kind. Compiling is allowed in the first few compiled
        units (a step may have a second variant) and after repeated misses; otherwise nothing that is not
        compiled yet may stall a step.
        """
        phase = self.state.phase
        if not phase.uses_compiled_code:
            return Lane.EAGER
        if phase is Phase.FLIPPING:
            return Lane.COMPILE
        if phase is Phase.SETTLING and has_first_arm(self.settling_units):
            return Lane.EAGER
        return Lane.COMPILE if self.may_compile > 0 else Lane.REUSE

    @property
    def without(self) -> str | None:
        """The part of the plan that is left out of the next unit."""
        return self.state.trying if has_first_arm(self.settling_units) else None

    @property
    def interleaved(self) -> PairedUnits | None:
        """Where the time of the next unit goes, if two kinds are compared now."""
        phase = self.state.phase
        if phase is Phase.SETTLING:
            return self.pairs
        return self.trial if phase is Phase.REFINING else None

    def began_comparing(self) -> None:
        """Two kinds of units are compared from now on."""
        self.settling_units = self.looks = 0
        if self.phase is Phase.SETTLING:
            self.pairs = PairedUnits()
        self.trial = PairedUnits()

    @property
    def settling_is_over(self) -> bool:
        """Whether enough units were interleaved, whatever could be learned from them."""
        return self.settling_units >= _MAX_SETTLING_UNITS

    def began_flip(self) -> None:
        """Forget what an earlier flip left behind."""
        self.pairs = PairedUnits()
        self.attempts = self.compiled_steps = self.settling_units = self.misses = self.looks = (
            self.recompile_episodes
        ) = 0
        self.may_compile = _UNITS_THAT_MAY_COMPILE
        self.failure = None

    def forget_misses(self) -> None:
        """What compiled code of another plan did not fit does not count."""
        self.failure = None
        self.attempts = self.misses = self.recompile_episodes = 0

    def begin_another_round(self, reason: str) -> None:
        """Another plan is to be tried on this signature, which is hot already."""
        self.state = State(reason=reason, flips=self.state.flips)
        self.hot = True

    def ran(
        self, *, lane: Lane, compiled: bool, ends_unit: bool, recompile_pays: Callable[[], bool] = _always
    ) -> None:
        """Book one step: which lane it had, and whether compiled code ran.

        ``recompile_pays`` is asked before what no longer fits may be compiled again: a run may end soon.
        """
        self.steps += 1
        self.ran_compiled = compiled
        self.is_compiling |= lane is Lane.COMPILE
        if ends_unit:
            self.end_unit()
        if lane is Lane.EAGER:
            return
        self.attempts += 1
        self.compiled_steps += compiled
        if lane is Lane.REUSE:
            self.misses = 0 if compiled else self.misses + 1
            if self.misses >= _MISSES_BEFORE_RECOMPILING:
                self._allow_recompile(recompile_pays)

    def end_unit(self) -> None:
        """The unit has ended, with a step of this signature or with one of another."""
        if self.state.phase in (Phase.SETTLING, Phase.REFINING):
            self.settling_units += 1
        if self.is_compiling:
            self.may_compile = max(0, self.may_compile - 1)
        self.is_compiling = False

    def slept(self, steps: int, *, compiled: bool, missed: bool) -> None:
        """Book steps of a nap, the last of which may have missed the compiled code."""
        self.steps += steps
        if compiled:
            self.attempts += steps
            self.compiled_steps += steps - missed
            self.misses = int(missed)

    def _allow_recompile(self, pays: Callable[[], bool]) -> None:
        self.misses = 0
        if not pays():
            return  # eager answers, and some steps later it is asked again
        self.recompile_episodes += 1
        if self.recompile_episodes > _MAX_RECOMPILE_EPISODES:
            self.failure = (
                f"compiled code did not fit its own step signature {_MAX_RECOMPILE_EPISODES} times over "
                "(something that changes from step to step is a constant of the graph)"
            )
        else:
            self.may_compile = _UNITS_THAT_MAY_COMPILE


class TrackBook:
    """The tracks of one fit, by signature; bounded, the one seen longest ago goes first.

    A track that ever used compiled code is kept.

    Args:
        limit: how many are kept.
        first: where each begins.
    """

    def __init__(self, limit: int = 64, first: State | None = None) -> None:
        self._limit = limit
        self.first = first or State()
        self._tracks: OrderedDict[StepSignature, Track] = OrderedDict()

    def __iter__(self) -> Iterator[Track]:
        return iter(self._tracks.values())

    def of(self, signature: StepSignature) -> Track:
        """The track of a signature, a new one if it was never seen."""
        track = self._tracks.get(signature)
        if track is None:
            self._make_room()  # before it is added: the newest one must stay
            track = self._tracks[signature] = Track(signature=signature, state=self.first)
        else:
            self._tracks.move_to_end(signature)
        return track

    def _make_room(self) -> None:
        if len(self._tracks) < self._limit:
            return
        idle = next((s for s, t in self._tracks.items() if not t.state.flips), None)
        if idle is not None:
            del self._tracks[idle]

    def main(self) -> Track | None:
        """The track that a receipt is about: most compiled steps, then most steps."""
        return max(self, key=lambda t: (t.state.flips > 0, t.compiled_steps, t.steps), default=None)

    @property
    def main_pairs(self) -> PairedUnits:
        """What its steps, eager and compiled in turns, have shown."""
        track = self.main()
        return PairedUnits() if track is None else track.pairs

    @property
    def main_state(self) -> State:
        """Where that one stands."""
        track = self.main()
        return self.first if track is None else track.state

    def flipped(self) -> int:
        """How many signatures were ever compiled."""
        return sum(t.state.flips > 0 for t in self)

    def all_are_hopeless(self) -> bool:
        """Whether no kind of step that was seen can be worth anything in this run."""
        return all(t.is_hopeless for t in self)

    def anyone_uses_compiled_code(self) -> bool:
        """Whether the installation is still needed."""
        return any(t.phase.uses_compiled_code for t in self)
