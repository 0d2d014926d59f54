"""What a child process does before a flip, while training goes on."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.run.trainer_facts import device_type, is_cut_into_buckets
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.swap.prewarm.choice import Surroundings, crowding, threads_meanwhile, why_not
from lightning_hotcompile.swap.prewarm.run import PrewarmRun
from lightning_hotcompile.swap.prewarm.threads import FewerThreads
from lightning_hotcompile.watch.step_record import StepRecord


class Ahead:
    """The child process of one flip, if it has one.

    Args:
        context: of the stage.
    """

    def __init__(self, context: StageContext) -> None:
        self._trainer = context.trainer
        self._module = context.module
        self._config = context.config
        self._limit_s = context.child_limit_s
        self.prewarm: PrewarmRun | None = None
        self.had_toolchain = False
        """Whether the compiler's toolchain had been started before the child process."""

        self.crowding = 1.0
        """Time of the child process beside this training / time of a compile that has all cores."""

    def why_none(self) -> str | None:
        """Why no child process fills the compiler's cache first, or ``None``."""
        config = self._config
        if config.threshold == 0:
            return "threshold=0 compiles before the first step"
        if config.times_kernels:
            return "max-autotune times kernels, which a training beside it would disturb"
        if is_cut_into_buckets(self._trainer):
            return "DDP cuts what is compiled into buckets, which no child process can do"
        return why_not(config.prewarm, config.backend, self.surroundings())

    def surroundings(self) -> Surroundings:
        """What there is beside this training, as things are now."""
        on_cpu = device_type(self._module) == "cpu"
        return Surroundings.here(
            accelerator=not on_cpu, processes=self._trainer.num_devices, device=self._module.device
        )

    def mark(self, record: StepRecord) -> None:
        """Note on a step that is about to run why it is slower than usual: it is traced, or lacks threads.

        The threads come back once the child is done, also where its own step never does.
        """
        if self.prewarm is not None and self.prewarm.is_tracing:
            record.disturbed = record.stalled = True
        elif self.prewarm is not None and self.prewarm.is_slowing:
            is_its_own = record.phase == Phase.PREWARMING.value  # which has just looked at the child
            if is_its_own or not self.prewarm.is_over():
                record.disturbed = record.slowed = True
        elif FewerThreads.are_lent():
            record.disturbed = record.slowed = True

    def look(self) -> None:
        """Take the threads back if the child is done: a step of another stage is about to run."""
        if self.prewarm is not None and self.prewarm.is_slowing:
            self.prewarm.is_over()

    def begin_prewarm(self, trace: Installation) -> None:
        """Start a child process that compiles what the step that is about to run will show.

        Args:
            trace: an installation of its own, of the same plan.
        """
        around = self.surroundings()
        self.crowding = crowding(around)
        self.prewarm = PrewarmRun(
            trace,
            config=self._config,
            limit_s=self._limit_s,
            device=str(self._module.device),
            threads=threads_meanwhile(around),
        )
        self.prewarm.begin()

    def why_crashed(self) -> str | None:
        """What has ended the child process, if that may end the training as well; ``None`` else."""
        crash = self.prewarm.crash if self.prewarm is not None and self.prewarm.is_over() else None
        return None if crash is None else f"{crash}; it compiles the step and runs it once"

    def end_step(self) -> None:
        """The step is over; one that was traced is no longer."""
        if self.prewarm is not None:
            self.prewarm.end_step()

    def cancel(self) -> None:
        """End the child process, whatever it does; a second call does nothing."""
        if self.prewarm is not None:
            self.prewarm.cancel()

    def in_words(self) -> Iterator[str]:
        """How it went, for a receipt."""
        if self.prewarm is not None:
            yield self.prewarm.in_words()
