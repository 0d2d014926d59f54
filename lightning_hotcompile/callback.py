"""The callback: Lightning's hooks, each a few lines, around one session per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_hotcompile.checkpoint_hooks import CheckpointHooks
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.receipt.event_kinds import Declined
from lightning_hotcompile.receipt.events import EventLog
from lightning_hotcompile.receipt.metrics import LoggerMetrics, PhaseInProgressBar
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.run.preflight import (
    Settled,
    agree_on,
    plan_for,
    why_idle,
    why_not_this_one,
    why_not_this_stage,
)
from lightning_hotcompile.run.reporting import empty_report
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.run.stage_run import StageRun
from lightning_hotcompile.run.stages import TRAIN
from lightning_hotcompile.run.store_in_use import StoreInUse
from lightning_hotcompile.run.trainer_facts import device_type
from lightning_hotcompile.run.verdicts import circumstances, why_not_again


class HotCompile(CheckpointHooks):
    """Compiles the training step once it is hot, keeps it if it is faster, and tells the story.

    Training starts eager at once. When the same step has come back ``threshold`` times and the
    forecast says that it pays, the hot part of the model is compiled in place and timed against
    eager steps; what does not pay is taken back. Checkpoints, logs and the module are as without.
    :class:`~lightning_hotcompile.HotCompileConfig` says more about each argument.

    Args:
        threshold: identical steps before a step signature is hot; 0 compiles before the first step.
        scope: what is compiled: ``auto``, ``step``, ``regions``, ``module`` or ``pattern``.
        targets: globs over module names (``net.blocks.*``), or functions as ``package.module:function``.
        keep_eager: globs over module names or class names that stay eager in every scope.
        compile_anyway: globs over module or class names that are compiled though they would stay eager.
        backend: name of a Dynamo backend, or the backend itself.
        mode: Inductor's mode, for example ``max-autotune``; not together with ``options``.
        dynamic: dynamic shapes: ``True``, ``False``, or ``"auto"`` for families of batches that vary.
        fullgraph: refuse graph breaks: a region that has one goes back to eager.
        options: Inductor's options, passed through.
        cost_gate: compile only if the forecast says that it pays.
        min_speedup: measured speed-up (eager time / compiled time) below which the flip is taken back.
        parity: if compiled code differs from eager: ``auto`` runs eagerly, ``warn``, ``raise``; ``off``.
        random: random numbers of compiled code: those of ``eager``, or of the ``backend``.
        stages: in which stages steps are compiled: ``train``, ``validate``, ``test``, ``predict``.
        compile_optimizer: compile the optimizer's step too; ``"auto"`` decides by scope and optimizer.
        fused_optimizer: on a CPU, try torch's fused kernels for optimizers nobody has chosen another for.
        max_flips: how often a signature may be compiled.
        max_signatures: how many step signatures may be compiled in one run.
        compile_timeout: seconds that compiling one piece of code may take; ``None`` = no limit.
        prewarm: let a child process fill the compiler's cache while training goes on.
        keep_freed_memory: on a CPU with glibc, let the process keep freed blocks of less than 32 MiB.
        store: folder for what later runs can use; ``"auto"`` = the user's cache folder, ``None`` = none.
        on_error: after an error of the compiler or of this callback: ``eager`` goes on, ``raise`` raises.
        log_prefix: prefix of the scalars in the Trainer's loggers; ``None`` writes none.
        verbose: print the plan and each event as they happen, and the whole receipt at the end.
        event_log: file to which each event is appended as one JSON line.

    Raises:
        ConfigError: an option has a value that is not allowed.

    Example:
        >>> trainer = Trainer(callbacks=[HotCompile()])
    """

    def __init__(
        self,
        threshold: int = 10,
        scope: str = "auto",
        targets: Sequence[str] = (),
        keep_eager: Sequence[str] = (),
        compile_anyway: Sequence[str] = (),
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        dynamic: bool | str | None = "auto",
        fullgraph: bool = False,
        options: Mapping[str, Any] | None = None,
        cost_gate: bool = True,
        min_speedup: float = 1.02,
        parity: str = "auto",
        random: str = "eager",
        stages: Sequence[str] = ("train",),
        compile_optimizer: bool | str = "auto",
        fused_optimizer: bool = True,
        max_flips: int = 3,
        max_signatures: int = 4,
        compile_timeout: float | None = 600.0,
        prewarm: bool | str = "auto",
        keep_freed_memory: bool = True,
        store: str | Path | None = "auto",
        on_error: str = "eager",
        log_prefix: str | None = "hotcompile",
        verbose: bool = False,
        event_log: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.config = HotCompileConfig(
            threshold=threshold,
            scope=scope,
            targets=targets,
            keep_eager=keep_eager,
            compile_anyway=compile_anyway,
            backend=backend,
            mode=mode,
            dynamic=dynamic,
            fullgraph=fullgraph,
            options=options,
            cost_gate=cost_gate,
            min_speedup=min_speedup,
            parity=parity,
            random=random,
            stages=stages,
            compile_optimizer=compile_optimizer,
            fused_optimizer=fused_optimizer,
            max_flips=max_flips,
            max_signatures=max_signatures,
            compile_timeout=compile_timeout,
            prewarm=prewarm,
            keep_freed_memory=keep_freed_memory,
            store=store,
            on_error=on_error,
            log_prefix=log_prefix,
            verbose=verbose,
            event_log=event_log,
        )
        self.from_environment = False
        self._metrics = LoggerMetrics(log_prefix)
        self._progress_bar = PhaseInProgressBar()
        self._events = EventLog(event_log)
        self._reports: dict[str, Report] = {}
        self._store = StoreInUse(store, backend)

    # --- what a user reads ------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """What happened so far in training, or in the first other stage if training was not watched."""
        reports = self.reports
        first = next(iter(reports.values()), None)
        return reports.get(TRAIN) or first or empty_report("observing", "this process has seen no step yet")

    @property
    def reports(self) -> dict[str, Report]:
        """The report of each stage that was watched, by its name in ``stages``."""
        return {**self._reports, **{stage: run.report for stage, run in self._runs.items()}}

    @property
    def phase(self) -> str:
        """The phase of the step that is trained, for people: ``observing``, ``steady`` and so on."""
        run = self._runs.get(TRAIN)
        return str(run.state.phase) if run is not None else self.report.phase

    # --- Lightning's hooks ------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the event log on rank zero only; a fit knows no verdict but that of its own checkpoint."""
        if stage == "fit":
            self._resumed, self._obeyed, self._ended = {}, {}, None
        self._events = self._events if trainer.is_global_zero else EventLog(None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan, and begin to watch; wrong targets and options that contradict the model are refused here."""
        self._begin(trainer, pl_module, TRAIN)
        self._begin(trainer, pl_module, "validate")  # planned before anything is changed in the model
        if TRAIN in self._runs:
            self._progress_bar.put(trainer, lambda: self.phase)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The only place where a phase of training changes, but for an error of ours and the end."""
        self._before_step(TRAIN, batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """The recorded operations are those of forward and backward; the update would double them."""
        if (run := self._runs.get(TRAIN)) is not None and run.session.nap is None:
            run.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; log the step time as often as Lightning logs."""
        if (run := self._runs.get(TRAIN)) is not None:
            run.after_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The training step is over, also in an epoch that was cut short; now validation's own code."""
        if TRAIN in self._runs:
            self._runs[TRAIN].guarded(Session.leave)
        super().on_validation_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change everything back, and hand over the receipt."""
        self._finish_all()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Change everything back."""
        self._finish_all()
        self._events.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change everything back, should a run have ended in no other way."""
        self._finish_all()
        super().teardown(trainer, pl_module, stage)
        self._events.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in mid-run has watched nothing yet, but has the reports so far."""
        return {**self.__dict__, "_runs": {}, "_reports": self.reports}

    def _begin(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Watch a stage, or say why not."""
        if stage not in self.config.stages:
            return
        if stage in self._runs:
            self._finish_all()  # a fit inside of a fit: what the outer one has in place is taken out
        log = EventLog(None) if why_not_this_one(trainer, self) else self._events  # who works tells the story
        if not self._runs:
            log.open()
        plan, reason = agree_on(lambda: self._plan(trainer, module, stage), trainer, self.config, stage)
        if reason is not None:
            rank_zero_info(f"HotCompile{'' if stage == TRAIN else f' ({stage})'}: declined: {reason}")
        if plan is None or (reason is not None and (stage != TRAIN or trainer.world_size > 1)):
            log.emit(declined := Declined(step=0, reason=reason or "", stage=stage))
            self._reports[stage] = empty_report("declined", declined.reason, (declined,), plan)
            return
        self._runs[stage] = StageRun(
            trainer,
            module,
            self.config,
            plan,
            stage=stage,
            events=self._events,
            metrics=self._metrics,
            store=self._store,
            declined=reason,
        )

    def _plan(self, trainer: Trainer, module: LightningModule, stage: str) -> Settled:
        reason = why_not_this_one(trainer, self) or why_idle(trainer, module)
        reason = reason or why_not_this_stage(trainer, self.config, stage)
        plan = None if reason else plan_for(trainer, module, self.config, stage)
        if plan is not None and stage == TRAIN:
            then, self._resumed = self._resumed, {}
            on_cpu = device_type(module) == "cpu"
            self._depends_on = circumstances(self.config, plan, precision=trainer.precision, on_cpu=on_cpu)
            reason = why_not_again(then, self._depends_on)
            self._obeyed = then if reason else {}
        if plan is not None and plan.is_empty:
            reason = f"nothing to compile in {type(module).__name__} (scope {plan.scope}: {plan.reason})"
        return plan, reason

    def _finish(self, stage: str) -> None:
        if (run := self._runs.get(stage)) is not None:  # until it has finished: Ctrl-C may come in between
            self._reports[stage] = report = run.finish()
            if stage == TRAIN:
                self._progress_bar.take_out()
                self._ended = report
            self._runs.pop(stage).tell(report)

    def _finish_all(self) -> None:
        for stage in reversed(list(self._runs)):
            self._finish(stage)
        self._store.end()
