"""What comes out of the loader, and how the step takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.hot import hot
from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import SgdNet
from tests.models import loader, make_trainer


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    weight: float = 1.0
    name: str = ""


class Own:
    """A batch class that Lightning cannot look into."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.moved = x, y, False


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Shaped:
    """A loader that makes something of each pair of tensors."""

    def __init__(self, make: Callable[[Tensor, Tensor, int], Any], n: int = 96) -> None:
        self._make, self._loader = make, loader(n)

    def __iter__(self) -> Iterator[Any]:
        return (self._make(x, y, i) for i, (x, y) in enumerate(self._loader))

    def __len__(self) -> int:
        return len(self._loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (((torch.arange(8) + i).sin(), i % 3) for i in range(100))


class TakesAttributes(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch.x), batch.y)


class TakesKeys(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        scale = 1.0 if batch.get("none") is None else 2.0
        return F.cross_entropy(self(batch["x"]), batch["y"]) * scale


class TakesNested(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        (x, extra), rest = batch
        return F.cross_entropy(self(x + 0.1 * extra[0]), rest["y"][0])


class TakesSeveral(SgdNet):
    """Sums the losses of whatever loaders gave a batch."""

    def loss(self, batch: Any) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        return torch.stack(
            [F.cross_entropy(self(x), y) for x, y in (p for p in parts if p is not None)]
        ).mean()


class Moves(TakesAttributes):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        batch.x, batch.y, batch.moved = batch.x.to(device), batch.y.to(device), True
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.x = batch.x * 2
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch.moved
        batch.x = batch.x + torch.randn_like(batch.x) * 0.01
        return batch


class Iterates(SgdNet):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        loss = self.loss(batch) * (1 + 0.01 * batch_idx)
        self.log("loss", loss, batch_size=8)
        return loss


class SometimesNone(SgdNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 4 == 3 else super().training_step(batch, batch_idx)


class Extras(SgdNet):
    """Returns a dict with more than the loss, which a hook reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {
            "loss": loss,
            "square": loss.detach() ** 2,
            "word": "x",
            "index": batch_idx,
            "nested": [loss.detach()],
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["word"] == "x"
        self.log("square", outputs["square"] + outputs["nested"][0] + outputs["index"])


class ChangesTheBatch(SgdNet):
    """Normalises its batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5).add_(0.1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", batch[0].sum())


class Keeps(SgdNet):
    """Collects outputs over an epoch."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


def ragged(x: Tensor, y: Tensor, i: int) -> Any:
    """Two sizes in turn: two signatures."""
    return (x, y) if i % 2 else (x[:6], y[:6])


def combined(mode: str) -> Callable[[], CombinedLoader]:
    return lambda: CombinedLoader({"a": loader(96), "b": loader(72, seed=1)}, mode)


def keyed(x: Tensor, y: Tensor, i: int) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "name": "word",
        "number": 7,
        "none": None,
        "objects": [Slotted(x, y)],
        "float": 0.5,
    }


def renamed(x: Tensor, y: Tensor, i: int) -> dict[str, Any]:
    """Strings and numbers that differ from batch to batch."""
    return {"x": x, "y": y, "name": f"item {i}", "number": i, "ids": [str(i)] * 8}


FEW = {"max_epochs": 5}

CELLS = [
    Cell(name="dict", model=TakesKeys, train=lambda: Shaped(keyed)),
    Cell(name="dict of what changes", model=TakesKeys, train=lambda: Shaped(renamed), trainer=FEW),
    Cell(name="namedtuple", model=TakesAttributes, train=lambda: Shaped(lambda x, y, i: Pair(x, y))),
    Cell(
        name="dataclass", model=TakesAttributes, train=lambda: Shaped(lambda x, y, i: Record(x, y, 0.5, "a"))
    ),
    Cell(name="own class", model=Moves, train=lambda: Shaped(lambda x, y, i: Own(x, y))),
    Cell(name="slots", model=TakesAttributes, train=lambda: Shaped(lambda x, y, i: Slotted(x, y))),
    Cell(
        name="nested", model=TakesNested, train=lambda: Shaped(lambda x, y, i: [(x, [x, None]), {"y": (y,)}])
    ),
    Cell(name="two sizes", model=SgdNet, train=lambda: Shaped(ragged), trainer={"max_epochs": 6}),
    Cell(name="odd last batch", model=SgdNet, train=lambda: loader(100)),
    Cell(name="stream", model=SgdNet, train=lambda: DataLoader(Stream(), 8)),
    Cell(name="workers", model=SgdNet, train=lambda: DataLoader(loader().dataset, 8, num_workers=1)),
    Cell(name="shuffle", model=SgdNet, train=lambda: DataLoader(loader().dataset, 8, shuffle=True)),
    Cell(name="list of loaders", model=TakesSeveral, train=lambda: [loader(), loader(seed=1)]),
    *[
        Cell(name=mode, model=TakesSeveral, train=combined(mode), trainer=FEW)
        for mode in ("min_size", "max_size_cycle", "max_size")
    ],
    Cell(name="dataloader_iter", model=Iterates, auto=Expect(scope="regions")),
    Cell(name="None at times", model=SometimesNone, trainer=FEW),
    Cell(name="None at other times", model=SometimesNone, trainer=FEW, options={"threshold": 3}),
    Cell(name="extras", model=Extras),
    Cell(name="batch changed in place", model=ChangesTheBatch),
    Cell(name="keeps outputs", model=Keeps, trainer=FEW),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)


@pytest.mark.parametrize("callbacks", [[], [hot()]], ids=["without", "with"])
def test_a_sequence_of_loaders_is_refused_by_lightning_as_without(callbacks: list[Any]) -> None:
    with pytest.raises(ValueError, match="sequential"):
        make_trainer(callbacks).fit(TakesSeveral(), combined("sequential")())
