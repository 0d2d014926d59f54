"""Whether torch's own fused kernel updates the weights faster than its loop; what is faster is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import HAVE_FUSED, why_not_fused
from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.run.fused_memory import FusedMemory
from lightning_hotcompile.run.fused_trials import OnTrial, UntilUpdate, Waiting, told
from lightning_hotcompile.swap.optimizers.fused_step import FusedStep, Stage
from lightning_hotcompile.watch.stats import Ratio
from lightning_hotcompile.watch.step_record import PairedUnits

LOOKS: tuple[int, ...] = (8, 16, 32)
"""After so many pairs of updates the ratio is looked at."""

MOST_STEPS = 512
"""Of the training in which a trial has to end: nothing is compiled before, and no step slept through."""

STEPS_AFTER = 3
"""Steps after a trial until a forecast knows what a step takes with the kernel."""

CONFIDENCE = 0.98
"""Of the interval at each look; the sign test can tell at that from 7 pairs on."""


class FusedWatch:
    """Tries the fused kernel of each optimizer that has one, once some steps have gone by.

    The kernel needs no compiler, and a plan leaves such an optimizer out. Where an earlier run has timed
    both, the kernel is only compared with the loop before it is used, or not tried.

    Args:
        optimizers: of this fit.
        wanted: whether anything may be changed.
        after: steps of the training before it is tried.
        min_speedup: time of the loop / time of the kernel that is worth a change.
        memory: what earlier runs have found.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        wanted: bool,
        after: int,
        min_speedup: float,
        memory: FusedMemory,
    ) -> None:
        self._optimizers = optimizers if wanted else ()
        self._after = after
        self._min_speedup = min_speedup
        self._memory = memory
        self._waiting: list[Waiting] | None = None
        self._on_trial: list[OnTrial] = []
        self._undecided: list[OnTrial] = []
        self._put_off: list[FusedStep] = []
        self._refused: list[str] = []
        self._until_told = 0
        self._updates = 0

    @property
    def is_busy(self) -> bool:
        """Whether steps have to be looked at, since one is on trial or will be."""
        if self._undecided or self._until_told:
            return True
        if not self._waiting:
            return self._waiting is None and bool(self._optimizers)
        return not all(each.is_put_off for each in self._waiting)

    @property
    def is_deciding(self) -> bool:
        """Whether one is on trial: nothing else is to be changed or compared meanwhile."""
        return self._until_told > 0 or any(each.known is None for each in self._undecided)

    def begin_step(self, steps: int, is_quiet: Callable[[], bool]) -> None:
        """A step begins, after so many others.

        Args:
            steps: that have ended.
            is_quiet: whether nothing else is compared now, and nothing else uses the processor.
        """
        if self._optimizers and self._waiting is None and steps > 0:
            self._waiting = list(self._to_be_tried())
        if self._waiting:
            due = [each for each in self._waiting if each.is_due(steps)]
            if due and is_quiet():
                self._waiting = [each for each in self._waiting if each not in due]
                _wait_no_longer(due)
                self._begin(due)
        self._updates = self._count_updates() if self._undecided else 0

    def _count_updates(self) -> int:
        """Of all that are on trial."""
        return sum(each.step.updates for each in self._undecided)

    def _to_be_tried(self) -> Iterator[Waiting]:
        """All that can be, but those of which an earlier run knows that the kernel is not worth it."""
        for index, optimizer in enumerate(self._optimizers):
            name, due = f"optimizer {index}", max(1, self._after)
            if (reason := why_not_fused(optimizer)) is not None:
                self._refuse(name, optimizer, reason)
                continue
            known = self._memory.of(optimizer, CONFIDENCE)
            if known is not None and not self._is_worth_it(known.speedup):
                found = f"an earlier run has timed it, {_not_faster(known.speedup, self._min_speedup)}"
                self._refuse(name, optimizer, found)
            else:
                yield Waiting(name=name, optimizer=optimizer, known=known, due=1 if known else due)

    def _begin(self, due: Sequence[Waiting]) -> None:
        for each in due:
            optimizer, reason = each.optimizer, why_not_fused(each.optimizer)
            if reason is not None:
                self._refuse(each.name, optimizer, reason)
                continue
            pairs, known = PairedUnits(), each.known
            step = FusedStep(optimizer, pairs.add_unit, is_timed=known is None)
            step.put()
            ratio = None if known is None else known.speedup
            trial = OnTrial(
                name=each.name, step=step, pairs=pairs, known=known, most_idle=each.most_idle, ratio=ratio
            )
            self._on_trial.append(trial)
            self._undecided.append(trial)

    def _refuse(self, name: str, optimizer: Optimizer, reason: str) -> None:
        kind = type(optimizer).__name__
        self._refused += [f"{name} ({kind}): {reason}"] if kind in HAVE_FUSED else []

    def _is_worth_it(self, ratio: Ratio) -> bool:
        return ratio.verdict == "faster" and ratio.value >= self._min_speedup

    def end_step(self, *, ends_unit: bool = True) -> tuple[bool, list[FusedOptimizer]]:
        """A step has ended: whether it took another time than usual, and what was decided after it.

        Args:
            ends_unit: whether gradients are not accumulated further.
        """
        if not self._undecided:
            self._until_told = max(0, self._until_told - 1)
            return False, []
        disturbed = self._count_updates() != self._updates
        for each in self._undecided:
            each.steps += 1
            each.idle += ends_unit and not each.step.updates
        self._until_told = max(0, self._until_told - 1)
        self._put_off_idle()
        for each in self._undecided:
            self._look_at(each)
            if each.steps >= MOST_STEPS and not each.is_over:
                each.step.leave(f"{each.step.updates} updates in {each.steps} steps are too few to tell")
        decided = [each for each in self._undecided if each.is_over]
        self._undecided = [each for each in self._undecided if not each.is_over]
        if any(each.step.stage is Stage.KEPT for each in decided):
            self._until_told = STEPS_AFTER
        return disturbed, list(map(told, decided))

    def _put_off_idle(self) -> None:
        for trial in [each for each in self._undecided if each.idle >= each.most_idle]:
            self._undecided.remove(trial)
            self._on_trial.remove(trial)
            self._put_off.append(trial.step)
            trial.step.take_out()
            optimizer = trial.step.optimizer
            later = Waiting(
                name=trial.name,
                optimizer=optimizer,
                known=trial.known,
                due=0,
                most_idle=2 * trial.most_idle,
                until_update=UntilUpdate(optimizer),
            )
            self._waiting = [*(self._waiting or ()), later]

    def _look_at(self, trial: OnTrial) -> None:
        step, left = trial.step, LOOKS[trial.looks :]
        if step.stage is not Stage.TIMING or trial.pairs.n < left[0]:
            return
        trial.looks += 1
        trial.ratio = ratio = trial.pairs.ratio(CONFIDENCE)
        if ratio is not None and self._is_worth_it(ratio):
            step.keep()
        elif trial.looks == len(LOOKS) or (ratio is not None and ratio.verdict == "slower"):
            step.leave(_not_faster(ratio, self._min_speedup))
        if trial.is_over:  # not where it ends without a verdict on the times
            self._memory.learn(step.optimizer, told(trial))

    def finish(self) -> None:
        """Give all optimizers back the step that they had."""
        for step in (*(each.step for each in self._on_trial), *self._put_off):
            step.take_out()
        _wait_no_longer(self._waiting or ())

    def saved_s(self, compiled_runs: Callable[[str], int]) -> float | None:
        """Seconds that kernels have saved, less what all trials took; ``None`` where none is in use.

        Args:
            compiled_runs: updates of an optimizer by compiled code, by its name. What that has saved over the
                kernel is in the time of the step; over the loop it saves what the kernel does, and that.
        """
        if all(each.step.stage is not Stage.KEPT for each in self._on_trial):
            return None
        return sum(
            each.saves_s * (each.step.runs + (each.step.stage is Stage.KEPT) * compiled_runs(each.name))
            - each.step.check_s
            for each in self._on_trial
        )

    def report(self) -> tuple[FusedOptimizer, ...]:
        """What was found."""
        return tuple(map(told, self._on_trial))

    def in_words(self) -> Iterator[str]:
        """Why an optimizer stayed as it was."""
        for each in self._on_trial:
            kind = type(each.step.optimizer).__name__
            if each.step.stage is Stage.LEFT:
                yield f"{each.name} ({kind}) has no use for torch's fused kernel: {each.step.reason}"
        yield from (f"torch's fused kernel was not tried for {each}" for each in self._refused)
        for late in self._waiting or ():
            if late.is_put_off:
                kind = type(late.optimizer).__name__
                yield f"torch's fused kernel was not tried for {late.name} ({kind}): it made no update"


def _wait_no_longer(waiting: Iterable[Waiting]) -> None:
    for each in waiting:
        if each.until_update is not None:
            each.until_update.end()


def _not_faster(ratio: Ratio | None, min_speedup: float) -> str:
    if ratio is None:
        return "too few updates could be compared"
    small = ratio.value < min_speedup
    return f"{ratio.verdict}: {ratio}, " + (f"below {min_speedup=:g}" if small else f"after {ratio.n} pairs")
