"""Two processes that Lightning spawns: the callback and the module are pickled on the way there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.hot import hot
from tests.matrix.compare import assert_close
from tests.matrix.nets import SgdNet
from tests.models import loader, make_trainer, seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this build of torch has no gloo",
    ),
]


class Tells(pl.Callback):
    """Writes what each process saw into a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        reports = [c.report for c in trainer.callbacks if type(c).__name__ == "HotCompile"]
        seen = {
            "weights": pl_module.state_dict(),
            "phases": [r.phase for r in reports],
            "proven": [region.proven for r in reports for region in r.regions],
        }
        torch.save(seen, f"{self.folder}/{trainer.global_rank}.pt")


def spawned(callbacks: list[Any], folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    trainer = make_trainer([*callbacks, Tells(str(folder))], devices=2, strategy="ddp_spawn", max_epochs=12)
    trainer.fit(seeded(SgdNet), loader())
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_processes_train_as_without(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In one scope: the callback that is pickled has nothing yet that depends on it."""
    plain = spawned([], tmp_path_factory.mktemp("plain"))
    under = spawned([hot(threshold=2)], tmp_path_factory.mktemp("under"))
    for before, after in zip(plain, under, strict=True):
        assert_close(before["weights"], after["weights"], "weights")
        assert after["phases"] == ["steady"]
        assert after["proven"]
        assert all(after["proven"])
