"""The hooks of validation, testing and prediction: all alike, so they stand apart."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile.either_lightning import Callback
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.run.stage_run import StageRun
from lightning_hotcompile.run.stages import STEP_METHOD
from lightning_hotcompile.swap.step_method import give_back


class EvaluationHooks(Callback):
    """Feeds the stages beside training; what :meth:`_begin` begins is a :class:`StageRun` in ``_runs``."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[str, StageRun] = {}

    def _begin(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        raise NotImplementedError

    def _finish(self, stage: str) -> None:
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch, or go on where the validation before this one ended."""
        if "validate" in self._runs:
            self._runs["validate"].guarded(Session.go_on)
        elif trainer.state.fn != "fit":  # a fit plans all before it changes anything in the model
            self._begin(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan, and begin to watch."""
        self._begin(trainer, pl_module, _stage(trainer))

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """The only place where a phase of this stage changes."""
        self._before_step(_stage(trainer), batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        run = self._runs.get(_stage(trainer))
        if run is not None:
            run.after_step()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Out of training's way until the next validation, or the receipt."""
        if trainer.state.fn != "fit":
            self._finish("validate")
        elif "validate" in self._runs:
            self._runs["validate"].guarded(Session.pause)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change everything back, and hand over the receipt."""
        self._finish(_stage(trainer))

    on_predict_start = on_test_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_predict_end = on_test_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """What another callback has kept of ours, and has put back as the stage ended, goes."""
        for method in STEP_METHOD.values():
            give_back(pl_module, method)

    def _before_step(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for name, other in self._runs.items():
            if name != stage:
                other.guarded(Session.look_aside)
        run = self._runs.get(stage)
        if run is not None:
            run.before_step(batch, batch_idx, dataloader_idx)


def _stage(trainer: Trainer) -> str:
    """What runs now: ``validate``, ``test``, ``predict``, or ``sanity_check``, which is never watched."""
    stage = trainer.state.stage
    return "" if stage is None else str(stage.value)
