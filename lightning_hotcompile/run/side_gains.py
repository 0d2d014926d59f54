"""What makes steps faster without a compiler: memory that stays with the process, and fused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.receipt.story import Story
from lightning_hotcompile.run.fused_memory import FusedMemory
from lightning_hotcompile.run.fused_watch import FusedWatch
from lightning_hotcompile.run.heap_watch import HeapWatch
from lightning_hotcompile.run.preflight import uses_fused_optimizers
from lightning_hotcompile.run.stages import TRAIN
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.step_record import StepRecord


class SideGains:
    """Looks for them in the first steps of a training; eager and compiled steps gain alike.

    Args:
        trainer: of this fit.
        module: the LightningModule.
        config: the callback's options.
        stage: ``train`` or another stage of the Trainer, in which nothing is done.
        story: told of what was found.
        memory: what earlier runs have found.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        config: HotCompileConfig,
        stage: str,
        story: Story,
        memory: FusedMemory,
    ) -> None:
        train = stage == TRAIN
        self.heap = HeapWatch(module.device.type, wanted=config.keep_freed_memory and train)
        self._strategy = trainer.strategy  # which has the Trainer's optimizers
        self._config = config
        self._memory = memory
        on_cpu = module.device.type == "cpu"  # else nothing is said of kernels that are for the CPU
        self._wants_fused = train and on_cpu and uses_fused_optimizers(trainer, config)
        # Who asks for compiled code whatever it costs has it first.
        self.fused = self._fused_of(trainer.optimizers, after=config.threshold + (not config.cost_gate))
        self._optimizers = list(trainer.optimizers)
        self._before: list[FusedWatch] = []
        """Of optimizers that were replaced since."""

        self._was_replaced = False
        self._story = story

    def _fused_of(self, optimizers: Sequence[Optimizer], *, after: int) -> FusedWatch:
        return FusedWatch(
            optimizers,
            wanted=self._wants_fused,
            after=after,
            min_speedup=self._config.min_speedup,
            memory=self._memory,
        )

    @property
    def is_busy(self) -> bool:
        """Whether steps have to be looked at one by one."""
        return self.fused.is_busy or self.heap.is_deciding

    @property
    def is_deciding(self) -> bool:
        """Whether something is on trial: nothing is compiled meanwhile."""
        return self.fused.is_deciding

    @property
    def has_kernels(self) -> bool:
        """Whether a fused kernel has updated weights."""
        return any(each.runs for each in self.report())

    def report(self) -> tuple[FusedOptimizer, ...]:
        """The optimizers that were tried, those too that were replaced."""
        return tuple(found for watch in (*self._before, self.fused) for found in watch.report())

    def saved_s(self, compiled_runs: Callable[[str], int]) -> float | None:
        """See :meth:`FusedWatch.saved_s`."""
        saved = [*(watch.saved_s(lambda _: 0) for watch in self._before), self.fused.saved_s(compiled_runs)]
        known = [seconds for seconds in saved if seconds is not None]
        return sum(known) if known else None

    def consider_step(self, steps: int, tracks: Iterable[Track]) -> None:
        """A step is about to be decided on, after so many others; a trial begins if no track is at work.

        Optimizers that somebody has put in place of those from the beginning are tried anew.
        """
        if self._wants_fused and self._strategy.optimizers != self._optimizers:
            self.fused.finish()
            self._before.append(self.fused)
            self._was_replaced = True
            self._optimizers = list(self._strategy.optimizers)
            self.fused = self._fused_of(self._optimizers, after=steps + self._config.threshold)
        self.fused.begin_step(steps, lambda: not any(track.phase.is_at_work for track in tracks))

    def begin_step(self) -> None:
        """A step begins."""
        self.heap.begin_step()

    def end_step(self, record: StepRecord) -> bool:
        """A step has ended, with nothing booked yet; whether steps take another time from now on."""
        changed, self._was_replaced = self._was_replaced, False
        if self.fused.is_busy:
            tried, decided = self.fused.end_step(ends_unit=record.ends_unit)
            record.disturbed |= tried
            for found in decided:
                self._story.tried_fused(found)
            changed |= any(found.kept for found in decided)
        if self.heap.end_step(disturbed=record.disturbed):
            self._story.kept_freed_memory(self.heap.before)
            changed = True
        return changed

    def finish(self) -> None:
        """Change back what ends with the fit.

        Optimizers that were replaced are asked again: a compiled step may have lain over theirs.
        """
        for watch in (*self._before, self.fused):
            watch.finish()

    def in_words(self) -> Iterator[str]:
        """What was found, for a receipt."""
        yield from self.heap.in_words()
        for watch in (*self._before, self.fused):
            yield from watch.in_words()
