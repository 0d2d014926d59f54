"""The callback in one stage of one Trainer call: a guarded session, what it tells and its report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import first_line
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Declined, Event, Planned
from lightning_hotcompile.receipt.events import EventLog, describe
from lightning_hotcompile.receipt.metrics import PHASE_NUMBER, LoggerMetrics, lightning_step
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.run.memory import Memory
from lightning_hotcompile.run.own_error import tell_of
from lightning_hotcompile.run.reporting import (
    build_report,
    empty_report,
    notes_on_repeating,
    scalars,
    timeline_image,
)
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.run.stages import TRAIN, ends_unit
from lightning_hotcompile.run.store_in_use import StoreInUse
from lightning_hotcompile.run.trainer_facts import device_type
from lightning_hotcompile.swap.tracing.signal_handlers import comes_from_a_handler


class StageRun:
    """Guards one session: an error of ours never stops the Trainer, unless that was asked for.

    Args:
        trainer: of this call.
        module: the LightningModule.
        config: the callback's options.
        plan: what is compiled once a step is hot.
        stage: ``train``, ``validate``, ``test`` or ``predict``.
        events: where events go.
        metrics: where numbers go.
        store: what earlier runs have learned.
        declined: why nothing is compiled, where that is settled before the first step; what makes steps
            faster without a compiler is done all the same.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        config: HotCompileConfig,
        plan: CompilePlan,
        *,
        stage: str,
        events: EventLog,
        metrics: LoggerMetrics,
        store: StoreInUse,
        declined: str | None = None,
    ) -> None:
        self.stage = stage
        self._trainer = trainer
        self._config = config
        self._events = events
        self._metrics = metrics
        self._own: list[Event] = []
        self._told = 0
        self._logs_every = getattr(trainer, "log_every_n_steps", 0) if stage == TRAIN else 0
        self._until_log: float = 0 if self._logs_every else math.inf
        self._notes: list[str] = []
        self._last_report: Report | None = None
        store.follow(config)
        store.begin(on_cpu=device_type(module) == "cpu")
        self._store = store
        self._memory = Memory(store, plan, config, stage)
        first = State() if declined is None else State(phase=Phase.DECLINED, reason=declined)
        self.session = Session(
            trainer, module, config, plan, self._emit, self._memory, stage=stage, first=first
        )
        self.guarded(lambda _: store.look_at_machine())
        if declined is not None:
            self._emit(Declined(step=0, reason=declined))

    @property
    def state(self) -> State:
        """Where the signature stands that the report is about."""
        return self.session.watch.tracks.main_state

    @property
    def report(self) -> Report:
        """What is known now."""
        self.session.book_finished_steps()
        notes = [*self._notes, *notes_on_repeating(self.session, self._config)]
        if self._store.why_not_kept:
            notes.append(f"the store keeps no compiled code: {self._store.why_not_kept}")
        return build_report(self.session, self._own, notes)

    def before_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A step begins; what happened since the last one is logged."""
        try:
            nap = self.session.nap
            if nap is None or not nap.goes_on(batch_idx):
                self.session.consider_step(batch, batch_idx, dataloader_idx)
                self._log_what_is_new()
                self.session.begin_step()
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
            self._switch_off(error)

    def before_update(self) -> None:
        """Gradients are there; with manual optimization the step goes on after it."""
        if self.session.watch.recorder is not None and self._trainer.lightning_module.automatic_optimization:
            self.guarded(lambda session: session.watch.end_recording())

    def after_step(self) -> None:
        """A step ended; its time is logged as often as Lightning logs."""
        try:
            nap = self.session.nap
            if nap is None:
                self.session.after_step()
            else:
                nap.went_on()
            self._until_log -= 1
            if self._until_log <= 0:
                self._log_step_time()
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
            self._switch_off(error)

    def guarded(self, action: Callable[[Session], None]) -> None:
        """Do something with the session; after an error of ours everything goes on eagerly."""
        try:
            action(self.session)
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        """Called while the error is handled."""
        if self._config.on_error == "raise" or comes_from_a_handler(error):
            self._answer_other_ranks(error)
            raise error
        self._notes.append(note := tell_of(error))
        with contextlib.suppress(Exception):
            self.session.give_up(note)

    def _answer_other_ranks(self, error: Exception) -> None:
        if self._trainer.world_size > 1:
            with contextlib.suppress(Exception):
                self.session.give_up(first_line(error))

    def _log_what_is_new(self) -> None:
        """Before the step that was considered begins: its time is its own."""
        told, self._told = self._told, len(self._own)
        if told != self._told and self._metrics.has_readers(self._trainer):
            with self.session.ledger.own_time:
                self._log(scalars(self.report))

    def _log_step_time(self) -> None:
        """Log if this batch is one to log; one batch is at most one step in Lightning's count."""
        batches = self._logs_every - (lightning_step(self._trainer) + 1) % self._logs_every
        self._until_log = batches
        if batches < self._logs_every:
            return
        if not ends_unit(self._trainer, self.stage):
            self._until_log = 1
            return
        self.session.book_finished_steps()
        with self.session.ledger.own_time:
            self._log(
                {
                    "step_ms": self.session.ledger.recent_step_ms,
                    "phase": PHASE_NUMBER[str(self.state.phase)],
                }
            )

    def finish(self) -> Report:
        """Change everything back and make the report."""
        self.guarded(Session.finish)
        self.guarded(self._make_report)
        return self._last_report or empty_report("declined", "; ".join(self._notes), self._own)

    def _make_report(self, session: Session) -> None:
        self._last_report = replace(self.report, ended=True)

    def tell(self, report: Report) -> None:
        """Keep for later runs what was learned; write the report to loggers and the console."""
        self.guarded(lambda session: self._tell(session, report))

    def _tell(self, session: Session, report: Report) -> None:
        track = session.watch.tracks.main()
        if track is not None and self._trainer.is_global_zero:
            installed, now = session.flip.installation, session.rounds.now
            self._memory.learn(
                track.signature,
                report,
                session.plan,
                compile_s=installed.timer.seconds,
                warm=installed.was_warm,
                forgone_s=now.weighing.forgone_s(track, now.judge.decision),
                had_toolchain=bool(session.flip.had_toolchain),
                ops=session.watch.op_statistics,
            )
            ahead = session.flip.ahead
            if ahead.prewarm is not None and ahead.prewarm.took_s is not None:
                self._memory.learn_child(
                    session.plan,
                    ahead.prewarm.took_s,
                    ahead.crowding,
                    had_toolchain=ahead.had_toolchain,
                    ops=session.watch.op_statistics,
                )
        if session.steps:
            self._log_receipt(report)
            title = "HotCompile" if self.stage == TRAIN else f"HotCompile ({self.stage})"
            rank_zero_info(report.to_text() if self._config.verbose else f"{title}: {headline(report)}")

    def _log_receipt(self, report: Report) -> None:
        if self._metrics.has_readers(self._trainer):
            self._log(scalars(report))
            self._metrics.log_text(self._trainer, self._name("receipt"), report.to_markdown())
            self._metrics.log_image(
                self._trainer, self._name("timeline"), lambda: timeline_image(report, self._own, self.stage)
            )

    def _log(self, values: dict[str, float | None]) -> None:
        self._metrics.log(self._trainer, {self._name(k): v for k, v in values.items()})

    def _name(self, name: str) -> str:
        return name if self.stage == TRAIN else f"{self.stage}/{name}"

    def _emit(self, event: Event) -> None:
        event = replace(event, stage=self.stage)
        self._own.append(event)
        self._events.emit(event)
        if self._config.verbose:
            rank_zero_info(f"HotCompile: {describe(event)}")
            if isinstance(event, Planned):
                rank_zero_info(event.tree)
