"""What a checkpoint keeps of the callback: the verdict on the plan, for the run that resumes it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hotcompile.evaluation_hooks import EvaluationHooks
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.run.stages import TRAIN
from lightning_hotcompile.run.verdicts import CHECKPOINT_KEY, to_keep


class CheckpointHooks(EvaluationHooks):
    """In hooks and not as the callback's state.

    Lightning would refuse two callbacks of a kind with a state, and warn whoever loads the checkpoint
    without this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resumed: dict[str, Any] = {}
        self._depends_on: dict[str, Any] = {}
        """On what the verdict on the training depends."""

        self._obeyed: dict[str, Any] = {}
        """The verdict of an earlier run that has declined this one, for the run that resumes it in turn."""

        self._ended: Report | None = None
        """Of the training that has ended, as long as no other one has begun."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what a resumed run has to know: the verdict on this plan, in plain types."""
        kept = to_keep(self._runs.get(TRAIN), self._ended, self._depends_on) or self._obeyed
        if kept:
            checkpoint[CHECKPOINT_KEY] = dict(kept)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the verdict of the run that is resumed; finders and tests load checkpoints as well."""
        if not self._runs and trainer.state.fn == "fit" and CHECKPOINT_KEY in checkpoint:
            self._resumed = dict(checkpoint[CHECKPOINT_KEY])
