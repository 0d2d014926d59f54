"""The callback: Lightning's hooks, each a few lines, around one session per fit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.preflight import plan_for, why_idle, why_not_this_one
from lightning_hotcompile.receipt.event_kinds import Declined, Event, Planned
from lightning_hotcompile.receipt.events import EventLog, describe
from lightning_hotcompile.receipt.metrics import (
    PHASE_NUMBER,
    LoggerMetrics,
    PhaseInProgressBar,
    lightning_step,
)
from lightning_hotcompile.receipt.report import Report, headline
from lightning_hotcompile.reporting import build_report, empty_report, scalars
from lightning_hotcompile.session import Session
from lightning_hotcompile.swap.ranks import Ranks
from lightning_hotcompile.swap.witness import first_line
from lightning_hotcompile.trainer_facts import ends_unit, versions

_log = logging.getLogger(__name__)


class HotCompile(Callback):
    """Compiles the training step once it is hot, keeps it if it is faster, and tells the story.

    Training starts eager at once. When the same step has come back ``threshold`` times and the
    forecast says that it pays, the hot part of the model is compiled in place and timed against
    eager steps; what does not pay is taken back. Checkpoints, logs and the module are as without.

    All arguments are those of :class:`~lightning_hotcompile.HotCompileConfig`, plain types.

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
        compile_optimizer: bool | str = "auto",
        max_flips: int = 3,
        max_signatures: int = 4,
        on_error: str = "eager",
        log_prefix: str = "hotcompile",
        verbose: bool = False,
        event_log: str | None = None,
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
            compile_optimizer=compile_optimizer,
            max_flips=max_flips,
            max_signatures=max_signatures,
            on_error=on_error,
            log_prefix=log_prefix,
            verbose=verbose,
            event_log=event_log,
        )
        self.from_environment = False
        self._metrics = LoggerMetrics(log_prefix)
        self._progress_bar = PhaseInProgressBar()
        self._events = EventLog(event_log)
        self._session: Session | None = None
        self._told = 0
        self._resumed: dict[str, Any] = {}
        self._notes: list[str] = []
        self._report = empty_report("observing", "no training step was seen yet")

    # --- what a user reads ------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """What happened so far: during a fit up to the last step, afterwards of the whole fit."""
        if self._session is None:
            return self._report
        return build_report(self._session, self._events.events)

    @property
    def phase(self) -> str:
        """The phase of the step that is trained, for people: ``observing``, ``steady`` and so on."""
        return str(self._session.main_state.phase) if self._session is not None else self._report.phase

    # --- Lightning's hooks ------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the event log on rank zero only."""
        if not trainer.is_global_zero:
            self._events = EventLog(None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan, and begin to watch; wrong targets and options that contradict the model are refused here."""
        self._events.clear()
        self._events.open()
        self._notes.clear()
        self._told = 0
        reason = why_not_this_one(trainer, self) or why_idle(trainer, pl_module)
        plan = None if reason else plan_for(trainer, pl_module, self.config)
        if plan is not None and reason is None:
            reason = self._verdict_of_resumed_run(plan)
        if plan is not None and plan.is_empty:
            reason = f"nothing to compile in {type(pl_module).__name__} (scope {plan.scope}: {plan.reason})"
        reason = Ranks(self.config.threshold).agree_to_watch(plan.digest if plan else "none", reason)
        if plan is None or reason is not None:
            self._emit(Declined(step=0, reason=reason or ""))
            self._report = empty_report("declined", reason or "", self._events.events, plan)
            rank_zero_info(f"HotCompile: declined: {reason}")
            return
        self._session = Session(trainer, pl_module, self.config, plan, self._emit)
        self._progress_bar.put(trainer, lambda: self.phase)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The only place where a phase changes."""
        if self._session is not None:
            self._guarded(trainer, lambda session: session.before_step(batch))
            self._log_what_is_new(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """The recorded operations are those of forward and backward; the update would double them."""
        if self._session is not None and pl_module.automatic_optimization:
            self._guarded(trainer, Session.end_recording)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; log the step time as often as Lightning logs."""
        session = self._session
        if session is not None:
            self._guarded(trainer, Session.after_step)
            every = getattr(trainer, "log_every_n_steps", 0)
            if every and ends_unit(trainer) and (lightning_step(trainer) + 1) % every == 0:
                step_ms = session.ledger.recent_step_ms
                self._metrics.log(trainer, {"step_ms": step_ms, "phase": PHASE_NUMBER[self.phase]})

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation runs eagerly, also after an epoch that was cut short."""
        if self._session is not None:
            self._guarded(trainer, Session.abandon_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change everything back, and hand over the receipt."""
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Change everything back."""
        self._finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change everything back, should a fit have ended in no other way."""
        self._finish(trainer)
        self._events.close()

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Lets a callback from the environment stand beside one from code."""
        return f"{super().state_key}[environment]" if self.from_environment else super().state_key

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: the verdict on this plan. Plain types; empty without one."""
        report = self.report
        if report.phase not in ("steady", "reverted"):
            return {}
        return {
            "format": 1,
            "phase": report.phase,
            "reason": report.reason,
            "plan_digest": report.plan_digest,
            "versions": dict(report.versions),
            "final": report.phase == "reverted" and not self._may_retry(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the verdict of the run that is resumed."""
        self._resumed = dict(state_dict)

    def _verdict_of_resumed_run(self, plan: CompilePlan) -> str | None:
        """A plan that was measured too slow or did not compile is not tried again by the same versions."""
        then, self._resumed = self._resumed, {}
        same = then.get("plan_digest") == plan.digest and then.get("versions") == versions()
        return f"before the run was resumed: {then['reason']}" if same and then.get("final") else None

    def _may_retry(self) -> bool:
        return self._session is not None and self._session.main_state.may_retry

    # --- inside -----------------------------------------------------------------------------------

    def _guarded(self, trainer: Trainer, action: Callable[[Session], None]) -> None:
        """An error of ours never stops a training, unless that was asked for."""
        session = self._session
        assert session is not None
        try:
            action(session)
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            _log.debug("HotCompile failed", exc_info=True)
            self._notes.append(
                f"HotCompile switched itself off after an error of its own: {first_line(error)}"
            )
            warnings.warn(self._notes[-1] + ". Training goes on eagerly.", HotCompileWarning, stacklevel=2)
            session.give_up(self._notes[-1])
            if trainer.world_size == 1:
                self._finish(trainer)

    def _emit(self, event: Event) -> None:
        self._events.emit(event)
        if self.config.verbose:
            rank_zero_info(f"HotCompile: {describe(event)}")
            if isinstance(event, Planned):
                rank_zero_info(event.tree)

    def _log_what_is_new(self, trainer: Trainer) -> None:
        told, self._told = self._told, len(self._events.events)
        if self._told != told:
            self._metrics.log(trainer, scalars(self.report, PHASE_NUMBER))

    def _finish(self, trainer: Trainer) -> None:
        session = self._session
        if session is None:
            return
        try:
            session.finish()
        finally:
            self._report = build_report(session, self._events.events, self._notes)
            self._session = None
            self._progress_bar.take_out()
        if session.steps:
            self._metrics.log(trainer, scalars(self._report, PHASE_NUMBER))
            self._metrics.log_text(trainer, "receipt", self._report.to_markdown())
            rank_zero_info(
                self._report.to_text() if self.config.verbose else f"HotCompile: {headline(self._report)}"
            )
