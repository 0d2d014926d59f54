"""A training of which only the steps are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def train(
    model: LightningModule,
    batches: torch.utils.data.Dataset[Any],
    callbacks: Sequence[Callback],
    **limits: Any,
) -> Trainer:
    """On the CPU and seeded, without what Lightning does beside the steps; the Trainer, when it is over.

    Args:
        model: as it begins.
        batches: whole ones.
        callbacks: of the Trainer, in this order.
        limits: the Trainer's arguments that say how long the training is.
    """
    trainer = Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    torch.manual_seed(2)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer
