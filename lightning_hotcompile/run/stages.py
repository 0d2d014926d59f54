"""What differs between training, validation, testing and prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning.pytorch import Trainer

from lightning_hotcompile.run import trainer_facts

TRAIN = "train"

STEP_METHOD = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""The method of the LightningModule that is one step of each stage."""


def ends_unit(trainer: Trainer, stage: str) -> bool:
    """Whether a unit of steps is complete: in training an optimizer step, elsewhere each step."""
    return stage != TRAIN or trainer_facts.ends_unit(trainer)


def begins_pass(trainer: Trainer, stage: str, batch_idx: int) -> bool:
    """Whether this is the first batch of an epoch, or of one run through the evaluation data."""
    if stage != TRAIN:
        return batch_idx == 0
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready <= 1


def remaining_batches(trainer: Trainer, stage: str, batch_s: float | None) -> int | None:
    """Batches of this stage that are left at ``batch_s`` seconds each, ``None`` if nothing limits them."""
    if stage == TRAIN:
        return trainer_facts.remaining_batches(trainer, batch_s)
    if stage == "predict":
        return _left(trainer.num_predict_batches, trainer.predict_loop.batch_progress.current.completed)
    if stage == "test":
        return _left(trainer.num_test_batches, trainer.test_loop.batch_progress.current.completed)
    return _remaining_validation(trainer)


def _left(batches: Sequence[int | float], done: int) -> int | None:
    total = sum(batches)
    return max(0, int(total) - done) if math.isfinite(total) else None


def _remaining_validation(trainer: Trainer) -> int | None:
    """What is left of this validation, and all of those that the rest of a fit will still bring."""
    fitting = trainer.state.fn == "fit"
    loop = trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop
    now = _left(trainer.num_val_batches, loop.batch_progress.current.completed)
    if not fitting or now is None:
        return now
    left = trainer_facts.remaining_batches(trainer, None)
    if left is None:
        return None
    return now + _validations(trainer, left) * int(sum(trainer.num_val_batches))


def _validations(trainer: Trainer, training_batches: int) -> int:
    """Runs of the validation that come with so many training batches."""
    every = getattr(trainer, "val_check_batch", None)
    epochs = trainer.check_val_every_n_epoch or 1
    return int(training_batches / (every * epochs)) if every and math.isfinite(every) else 0
