"""Trains steps with collectives of their own on two processes (gloo, CPU); run by ``train_in_turn.py``.

Each case is trained without the callback, then with it. What was logged in each step, the weights and the
report go to ``CASE-RANK.pt``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.train_two_ranks import ROWS, batches
from tests.hot import hot
from tests.models import Net, make_trainer, seeded

FLIP = 3
"""The batch in which compiled code is put in place."""

TIMEOUT_S = 20
"""A collective that one rank does not come to fails after this."""


class LogsItsMean(Net):
    """Logs the mean loss of all ranks, which it reduces by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        loss = self.loss(batch)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.log("mean", mean)
        return loss


class ReducesItsLoss(Net):
    """The sum of all ranks is its loss; in eager code its gradient is that of the rank's own part."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        loss = self.loss(batch)
        dist.all_reduce(loss)
        self.log("sum", loss)
        return loss


class ReducesALogFirst(Net):
    """Lightning reduces a value that is logged before the step's own collective."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        rows = torch.tensor(float(len(batch[0])))
        dist.all_reduce(rows)
        self.log("rows", rows)
        return loss


class Keeps(Callback):
    """Keeps what was logged in each step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """The values of this step."""
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def _always(i: int) -> int:
    return ROWS


def _short_at_the_flip(i: int) -> int:
    return ROWS - 1 if i == FLIP else ROWS


CASES: dict[str, tuple[type[Net], Callable[[int], int]]] = {
    "same shapes": (LogsItsMean, _always),
    "other shapes": (LogsItsMean, _short_at_the_flip),
    "after a log": (ReducesALogFirst, _short_at_the_flip),
    "in the loss": (ReducesItsLoss, _always),
}
"""Each case: its model, and how many rows each batch of rank 1 has."""


def fit(case: str, rank: int, callbacks: list[Any]) -> dict[str, Any]:
    """Train one case; what was logged, and the weights."""
    kind, rows = CASES[case]
    model, keeps = seeded(kind), Keeps()
    trainer = make_trainer(
        [*callbacks, keeps],
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)),
        use_distributed_sampler=False,
        max_epochs=1,
    )
    trainer.fit(model, DataLoader(batches(rank, rows if rank else _always), batch_size=None))
    return {"logged": keeps.logged, "weights": model.state_dict()}


def main(folder: Path, cases: list[str]) -> None:
    """One case after the other, in each of the two processes."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for case in cases:
        torch._dynamo.reset()
        callback = hot(scope="step", on_error="eager")
        plain, found = fit(case, rank, []), fit(case, rank, [callback])
        seen = {"plain": plain, "found": found, "report": callback.report.to_dict()}
        torch.save(seen, folder / f"{case}-{rank}.pt")
