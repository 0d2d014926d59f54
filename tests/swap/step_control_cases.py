"""Steps with hostile control flow: each class is one case (see ``fire.Fire``)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hotcompile.swap.dynamo import TORCH
from tests.swap.fire import Fire


class Skips(Fire):
    """No loss on some steps."""

    most_graphs = 3
    most_recompiles = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            self.log("skipped", 1.0)
            return None
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class ReturnsMuch(Fire):
    most_graphs = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {
            "loss": loss,
            "text": f"batch {batch_idx % 1}",
            "logits": logits.detach(),
            "n": [1, (2, None)],
        }


class Failed(Exception):
    pass


class Caught(Fire):
    most_graphs = 3 if TORCH >= (2, 13) else 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.log("before", loss)
            if batch_idx >= 0:
                raise Failed("on purpose")
        except Failed as error:
            self.log("caught", float(len(str(error))))
        finally:
            self.log("finally", loss)
        return loss


class Escapes(Fire):
    most_graphs = 2
    raises = Failed

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.log("before", loss)
            if self.global_step == 9:
                raise Failed("at", 9, {"loss": 1})
        finally:
            self.note = "finally"
        return loss


class FailsInAnOperation(Fire):
    """An error of a tensor operation, at a step that compiled code runs."""

    raises = Exception

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("before", loss)
        if self.global_step == 9:
            batch[0] @ batch[0][:3]
        return loss


class Asserts(Fire):
    most_graphs = 4
    raises = AssertionError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        assert loss.ndim == 0, f"loss is {loss}"
        assert self.global_step < 10, f"step {self.global_step} of {batch[0].shape}"
        return loss


class AssertsOnData(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        assert torch.isfinite(loss), f"loss is {loss}"
        assert (batch[0].abs() < 100).all()
        return loss


class Iterates(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        penalty = sum(p.pow(2).sum() for n, p in self.named_parameters() if n.endswith("weight"))
        for i, (block, scale) in enumerate(zip(self.blocks, [0.1, 0.2], strict=False)):
            penalty = penalty + scale * i * block.up.bias.sum()
        self.log("penalty", penalty)
        return loss + 1e-3 * penalty


def halves(x: Tensor) -> Iterator[Tensor]:
    yield x[: len(x) // 2]
    yield x[len(x) // 2 :]


class Yields(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [
            F.cross_entropy(self(x), y) for x, y in zip(halves(batch[0]), halves(batch[1]), strict=True)
        ]
        self.log("first", losses[0])
        return torch.stack(losses).mean()


@contextlib.contextmanager
def counted(module: Fire, name: str) -> Iterator[str]:
    module.note = f"enter {name}"
    try:
        yield name
    finally:
        module.note += f", exit {name}"


class OwnContext(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with counted(self, "loss") as name:
            loss = self.loss(batch)
            self.log(name, loss)
        return loss


class BreakInContext(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with counted(self, "loss"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            out = self(batch[0])
            self.total = out.detach().sum().item()
            loss = F.cross_entropy(out, batch[1])
        self.log("loss", loss)
        return loss


class TorchContexts(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self(batch[0])
            with torch.enable_grad():
                assert torch.is_grad_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self(batch[0])
        with torch.profiler.record_function("mine"), torch.set_grad_enabled(True):
            return F.cross_entropy(logits.float(), batch[1]) + (logits.float() - target).pow(2).mean()


class AnomalyMode(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Profiles(Fire):
    most_graphs = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("mine"):
            loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Closures(Fire):
    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total = 0

        def add(value: Tensor) -> None:
            nonlocal total
            total = total + value
            self.log("partial", value)

        add(self.loss(batch))
        return total


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.arange(n) / n


class Cached(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0] + table(8)), batch[1])


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor
    name: str = "out"


class DataClasses(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        out = Output(logits=logits, loss=F.cross_entropy(logits, batch[1]))
        out.name = "changed"
        self.log(out.name, out.loss)
        return out.loss


class ChangesBatch(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        batch[0][:, 0] = 0
        batch.append("mine")
        return F.cross_entropy(self(batch[0]), batch[1])


class DataDependent(Fire):
    most_graphs = 8
    most_recompiles = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if loss.item() > 1.1:
            self.log("large", loss)
            loss = loss * 0.5
        elif (batch[1] == 0).sum() > 2:
            self.log("zeros", loss)
        return loss
