"""What differs between training, validation, testing and prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    """Whether a unit of steps is complete: in training an optimizer step, elsewhere each step.

    In training of the batch that is about to run or has just run.
    """
    if stage != TRAIN or trainer.accumulate_grad_batches == 1:
        return True
    return not trainer.fit_loop._should_accumulate()


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
        return _left(trainer.num_predict_batches, trainer.predict_loop)
    if stage == "test":
        return _left(trainer.num_test_batches, trainer.test_loop)
    return _remaining_validation(trainer)


def _left(batches: Sequence[int | float], loop: Any) -> int | None:
    """Steps that are left of one run through the data, of which each loader has so many batches."""
    steps = _steps(batches, loop)
    return None if steps is None else max(0, steps - loop.batch_progress.current.completed)


def _steps(batches: Sequence[int | float], loop: Any) -> int | None:
    """Loaders of a ``CombinedLoader`` come one after the other, or side by side."""
    mode = getattr(loop._combined_loader, "_mode", "sequential")
    total = {"min_size": min, "max_size": max, "max_size_cycle": max}.get(mode, sum)(batches)
    return int(total) if math.isfinite(total) else None


def _remaining_validation(trainer: Trainer) -> int | None:
    """What is left of this validation, and all of those that the rest of a fit will still bring."""
    fitting = trainer.state.fn == "fit"
    loop = trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop
    now = _left(trainer.num_val_batches, loop)
    if not fitting or now is None:
        return now
    left = trainer_facts.remaining_batches(trainer, None)
    validations = None if left is None else _validations(trainer, left)
    each = _steps(trainer.num_val_batches, loop)
    return None if validations is None or each is None else now + validations * each


def _validations(trainer: Trainer, training_batches: int) -> int | None:
    """Runs of the validation that come with so many training batches; ``None`` if they come by the clock."""
    every = getattr(trainer, "val_check_batch", None)
    epochs = trainer.check_val_every_n_epoch or 1
    return int(training_batches / (every * epochs)) if every and math.isfinite(every) else None
