"""Steps that log in every way there is: each class is one case (see ``fire.Fire``)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.swap.fire import Fire


class EveryKeyword(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("bar", loss, prog_bar=True)
        self.log("hidden", loss, logger=False)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("max", loss, on_epoch=True, reduce_fx="max")
        self.log("min", loss, on_epoch=True, reduce_fx=torch.min)
        self.log("sum", loss, on_epoch=True, reduce_fx="sum")
        self.log("own", loss, on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log("synced", loss, sync_dist=True, on_epoch=True)
        self.log("sized", loss, batch_size=3, on_epoch=True)
        self.log("index", loss, add_dataloader_idx=False)
        self.log("zero", loss, rank_zero_only=True)
        self.log("graph", loss, enable_graph=True)
        self.log(value=loss, name="named")
        self.log("positional", loss, True, False, True, True, "max")
        return loss


class FromForward(Fire):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.log("spread", out.std())
        return out


class FromForwardAsAModule(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", 1.0)
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("after", loss)
        return loss

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.log("inside", out.mean())
        return out


class Reporter(nn.Module):
    """Holds the module that it hangs in, outside of the tree of modules."""

    def __init__(self, owner: Fire) -> None:
        super().__init__()
        self.owner = [owner]
        self.scale = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.scale(x)
        self.owner[0].log("nested", out.abs().max())
        return out


class FromASubmodule(Fire):
    def __init__(self) -> None:
        super().__init__()
        self.reporter = Reporter(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.reporter(super().forward(x))


class ThroughTheTrainer(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.trainer.lightning_module.log("round_trip", loss)
        return loss


class Helper:
    def __init__(self, module: Fire) -> None:
        self.module = module

    def report(self, **values: Any) -> None:
        for name, value in values.items():
            self.module.log(name, value, prog_bar=name == "a")


class FromAHelper(Fire):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.helper.report(a=loss, b=2 * loss)
        return loss


class BoundEarly(Fire):
    """``self.log`` was taken before the flip: the real method is called inside of the compiled step."""

    most_graphs = 4

    def __init__(self) -> None:
        super().__init__()
        self.early = [self.log]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("one", loss)
        self.early[0]("two", loss * 2)
        self.log("three", loss)
        return loss


class PartialEarly(Fire):
    most_graphs = 4

    def __init__(self) -> None:
        super().__init__()
        self.on_bar = functools.partial(self.log, prog_bar=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.on_bar("bar", loss)
        return loss


class SameNames(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        log, on_bar = self.log, functools.partial(self.log, prog_bar=True)
        log("a", loss)
        on_bar("b", loss * 3)
        (lambda v: self.log("c", v))(loss + 1)
        getattr(self, "log")("d", loss)  # noqa: B009
        return loss


class ThroughTheClass(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("first", loss)
        Fire.log(self, "second", loss * 2)
        super().log("third", loss * 3)
        return loss


class OwnWrapper(Fire):
    def my_log(self, name: str, value: Any, **options: Any) -> None:
        self.log(f"train/{name}", value, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.my_log("loss", loss, on_epoch=True)
        self.my_log(f"twice_{2}", loss * 2)
        return loss


class OverriddenLog(Fire):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.note = name
        super().log(f"mine/{name}", value, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log_dict({"a": loss, "b": 2.0})
        return loss


class ReturningLog(Fire):
    """What an own ``log`` returns is used in the step."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        super().log(name, value, *args, **kwargs)
        return value * 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.log("loss", self.loss(batch))


class CountingLog(Fire):
    """An own ``log`` changes what the step reads later on."""

    most_graphs = 4
    most_recompiles = 2

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        super().log(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        before = self.count
        self.log("loss", loss)
        return loss * (1 + self.count - before)


class Dynamic(Fire):
    """``__getattr__`` and a property beside the module's own."""

    def __getattr__(self, name: str) -> Any:
        if name == "magic":
            return 2.0
        return super().__getattr__(name)

    @property
    def weight(self) -> float:
        return 0.5 * self.magic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.weight
        self.log("loss", loss)
        return loss


class Numbers(Fire):
    most_graphs = 3
    most_recompiles = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("item", loss.item())
        self.log("float", 3.5)
        self.log("int", 4)
        self.log("bool", True)
        self.log("tensor_int", torch.tensor(5))
        self.log("tensor_bool", torch.tensor(True))
        self.log("one_element", loss.reshape(1))
        self.log("index", batch_idx)
        return loss


class FromNumpy(Fire):
    most_graphs = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("numpy", np.float32(loss.detach().numpy()))
        self.log("mean", float(np.mean(batch[0].numpy())))
        return loss


class ConstantNumpy(Fire):
    most_graphs = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("half", np.float64(0.5))
        return loss


class ChangedInPlace(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value = loss.detach().clone()
        kept = {"b": value}
        self.log("a", value)
        self.log_dict(kept)
        kept["b"] = value + 7
        kept["c"] = value
        value.zero_()
        self.log("d", value)
        return loss


class Dicts(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"x": loss, "y": 1.0}, prog_bar=True, on_epoch=True)
        self.log_dict(dict(z=loss))  # noqa: C408
        self.log_dict({f"block_{i}": b.up.weight.norm() for i, b in enumerate(self.blocks)})
        return loss


class NoGrad(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.no_grad():
            self.log("norm", self.head.weight.norm())
        return loss


class InferenceMode(Fire):
    """A backend that fails inside of inference mode leaves the whole process in it."""

    most_graphs = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.inference_mode():
            self.log("inference", self.head.weight.detach().mean())
        return loss


class InBranches(Fire):
    most_graphs = 3
    most_recompiles = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2:
            self.log("odd", loss)
        elif batch_idx == 4:
            self.log("four", loss, on_epoch=True)
        for i in range(3):
            self.log(f"loop_{i}", loss * i)
        return loss


class Metrics(Fire):
    most_graphs = 4

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("first", loss)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, metric_attribute="mean", on_step=False, on_epoch=True)
        self.log("last", loss)
        return loss


class MetricUsedTwice(Fire):
    """The step's value of a logged metric is that of its last call before it was logged."""

    most_graphs = 6

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.accuracy(logits.flip(0), batch[1])
        return F.cross_entropy(logits, batch[1])


class Collection(Fire):
    most_graphs = 4

    def __init__(self) -> None:
        super().__init__()
        one = torchmetrics.classification.MulticlassAccuracy(3)
        two = torchmetrics.classification.MulticlassF1Score(3)
        self.all = torchmetrics.MetricCollection({"acc": one, "f1": two}, prefix="train_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log_dict({f"step_{k}": v for k, v in self.all(logits, batch[1]).items()})
        self.log_dict(self.all, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


class Computed(Fire):
    most_graphs = 4
    most_recompiles = 2

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("so_far", self.accuracy.compute())
        if batch_idx == 5:
            self.accuracy.reset()
        return F.cross_entropy(logits, batch[1])


class FunctionalMetric(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("acc", torchmetrics.functional.accuracy(logits, batch[1], task="multiclass", num_classes=3))
        return F.cross_entropy(logits, batch[1])


class OwnReductions(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("largest", loss, on_epoch=True, reduce_fx=max)
        self.log_dict({"a": loss}, on_epoch=True, reduce_fx="max", batch_size=len(batch[0]))
        return loss


class RefusedName(Fire):
    """Lightning's own error is that of eager, and what was logged before it is logged."""

    raises = Exception

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("fine", loss)
        if self.global_step == 9:
            self.log("bad", "a string")
        return loss


class CaughtRefusal(Fire):
    """The step catches what ``self.log`` raises."""

    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.log("bad", "a string")
        except ValueError:
            self.log("good", loss)
        return loss


class CaughtName(Fire):
    """The same for a name that only Lightning may give."""

    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.log("bad/dataloader_idx_0", loss)
        except MisconfigurationException:
            self.log("good", loss)
        return loss


class CaughtNesting(Fire):
    """The same for values within values."""

    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.log("bad", {"a": {"b": loss}})  # type: ignore[arg-type]
        except ValueError:
            self.log("good", loss)
        return loss


class MutableList(Fire):
    """The list of the values that are logged is emptied after the call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        values = {"a": loss}
        self.log_dict(values)
        values.clear()
        return loss


class ReadsMetricsInTheStep(Fire):
    """What was logged earlier in the same step is read back through the Trainer."""

    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("now", loss)
        read = self.trainer.callback_metrics.get("now")
        self.note = None if read is None else read.clone()
        return loss


class Many(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for name, parameter in self.named_parameters():
            self.log(f"norm/{name}", parameter.norm())
        return loss
