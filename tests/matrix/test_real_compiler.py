"""The cells of most value with Inductor itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import hot
from tests.matrix.compare import Cell, assert_same_run, check, in_scopes, outcome, seed
from tests.matrix.nets import AdamNet, SgdNet
from tests.matrix.test_manual import Gan
from tests.matrix.test_torch_modules import attend, inner, sequence
from tests.models import loader, make_trainer, seeded

pytestmark = pytest.mark.slow


class Convolutions(SgdNet):
    """A small CNN: running statistics, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        image = self.inp(x.view(-1, 1, 2, 4))
        for block in self.blocks:
            image = block(image)
        return self.head(F.adaptive_avg_pool2d(image, 1).flatten(1))


class Drops(SgdNet):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)


def sequences() -> nn.Module:
    return nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)])


def both(modules: Any, x: Tensor) -> Tensor:
    recurrent, attention = modules
    return attend(attention, recurrent(sequence(x))[0][:, -1])


CELLS = [
    Cell(name="CNN with BatchNorm", model=Convolutions),
    Cell(
        name="dropout, accumulation and clipping",
        model=Drops,
        regions=None,
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 6},
    ),
    Cell(name="LSTM and attention", model=inner(sequences, both), regions=None),
    Cell(name="GAN", model=Gan, auto=None),
    Cell(
        name="bf16-mixed",
        model=SgdNet,
        regions=None,
        trainer={"precision": "bf16-mixed"},
        tolerance=1e-2,
    ),
    Cell(name="dropout", model=Drops, auto=None),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(Cell(**{**vars(cell), "options": {"backend": "inductor"}}), scope)


def test_resuming(tmp_path: Path) -> None:
    def whole(callback_of: Any) -> Any:
        seed()
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt"
        trainer = make_trainer(callback_of(), max_epochs=3)
        trainer.fit(seeded(AdamNet), loader())
        trainer.save_checkpoint(path)
        torch._dynamo.reset()
        model, trainer = seeded(AdamNet), make_trainer(callbacks := callback_of(), max_epochs=6)
        trainer.fit(model, loader(), ckpt_path=path)
        return outcome(model, trainer), callbacks

    plain, _ = whole(list)
    under, callbacks = whole(lambda: [hot(backend="inductor", threshold=2)])
    assert callbacks[0].report.phase == "steady"
    assert_same_run(plain, under)
