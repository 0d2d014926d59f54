"""Lightning's own callbacks beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import Tensor, nn

from tests.matrix.compare import Cell, check, in_scopes
from tests.matrix.nets import Searches, SgdNet, TinyBlock
from tests.models import loader


class Backbone(SgdNet):
    """What ``BackboneFinetuning`` asks for: a backbone, and an optimizer of what is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(TinyBlock(8), TinyBlock(8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.inp(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class AddsGroups(pl_callbacks.BaseFinetuning):
    """Unfreezes one block per epoch, each with a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.blocks[epoch - 1], optimizer, lr=0.01)


class Unfrozen(SgdNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Stops(pl_callbacks.Callback):
    """Asks the Trainer to stop in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 29:
            trainer.should_stop = True


class TouchesWeights(pl_callbacks.Callback):
    """Changes parameters between steps, in place and as a whole."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight.clamp_(-0.2, 0.2)
        pl_module.blocks[0].layer.weight.data = pl_module.blocks[0].layer.weight.data * 0.99


class ReplacesAModule(pl_callbacks.Callback):
    """Puts another module in place in mid-run (as quantization does)."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 3:
            linear, old = nn.Linear(8, 8, bias=False), pl_module.blocks[1].layer
            linear.weight = old.weight
            pl_module.blocks[1].layer = nn.Sequential(linear, nn.Softsign())


def pruning() -> list[Any]:
    return [pl_callbacks.ModelPruning("l1_unstructured", amount=lambda epoch: 0.3 if epoch == 1 else 0.0)]


CELLS = [
    Cell(
        name="accumulation scheduler",
        model=SgdNet,
        callbacks=lambda: [pl_callbacks.GradientAccumulationScheduler({0: 1, 2: 2, 4: 3})],
        trainer={"max_epochs": 8},
    ),
    Cell(
        name="weight averaging",
        model=SgdNet,
        val=lambda: loader(16),
        callbacks=lambda: [pl_callbacks.WeightAveraging(avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)],
    ),
    Cell(
        name="EMA",
        model=SgdNet,
        val=lambda: loader(16),
        callbacks=lambda: [pl_callbacks.EMAWeightAveraging(decay=0.9)],
    ),
    Cell(
        name="SWA",
        model=Backbone,
        callbacks=lambda: [pl_callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=3)],
        trainer={"max_epochs": 5},
    ),
    Cell(
        name="backbone finetuning",
        model=Backbone,
        callbacks=lambda: [pl_callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=3, verbose=False)],
        trainer={"max_epochs": 7},
    ),
    Cell(
        name="groups in mid-run", model=Unfrozen, callbacks=lambda: [AddsGroups()], trainer={"max_epochs": 6}
    ),
    Cell(
        name="rate finder",
        model=Searches,
        callbacks=lambda: [pl_callbacks.LearningRateFinder(num_training_steps=8, early_stop_threshold=None)],
    ),
    Cell(
        name="early stopping",
        model=SgdNet,
        val=lambda: loader(16),
        callbacks=lambda: [pl_callbacks.EarlyStopping("val_loss", patience=3, min_delta=1.0)],
        trainer={"max_epochs": 12},
    ),
    Cell(name="stops in mid-epoch", model=SgdNet, callbacks=lambda: [Stops()]),
    Cell(name="timer", model=SgdNet, callbacks=lambda: [pl_callbacks.Timer({"hours": 1})]),
    Cell(
        name="monitors",
        model=SgdNet,
        callbacks=lambda: [
            pl_callbacks.DeviceStatsMonitor(cpu_stats=False),
            pl_callbacks.LearningRateMonitor("step", log_momentum=True),
            pl_callbacks.ModelSummary(max_depth=-1),
        ],
        ignored=("DeviceStatsMonitor",),
    ),
    Cell(
        name="progress bar",
        model=SgdNet,
        callbacks=lambda: [pl_callbacks.RichProgressBar()],
        trainer={"enable_progress_bar": True},
    ),
    Cell(name="touches weights", model=SgdNet, callbacks=lambda: [TouchesWeights()]),
    Cell(
        name="replaces a module",
        model=SgdNet,
        callbacks=lambda: [ReplacesAModule()],
        trainer={"max_epochs": 5},
    ),
    Cell(name="pruning", model=SgdNet, callbacks=pruning, trainer={"max_epochs": 5}),
    Cell(
        name="throughput",
        model=SgdNet,
        callbacks=lambda: [pl_callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))],
        ignored=("device/", "time"),
    ),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)


@pytest.mark.parametrize("scope", ["auto", "regions"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_model_checkpoint_writes_the_same_files(place: str, scope: str, tmp_path: Path) -> None:
    folders: list[Path] = []

    def checkpoints() -> list[Any]:
        folders.append(tmp_path / str(len(folders)))
        settings = {"monitor": "val_loss", "save_top_k": 2, "every_n_epochs": 1, "save_last": True}
        return [pl_callbacks.ModelCheckpoint(folders[-1], filename="{epoch}-{step}", **settings)]

    check(
        Cell(
            name="checkpoint",
            model=SgdNet,
            val=lambda: loader(16),
            callbacks=checkpoints,
            trainer={"enable_checkpointing": True},
        ),
        scope,
    )
    names = [sorted(f.name for f in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) == 3
