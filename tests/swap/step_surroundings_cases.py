"""Steps that read, change and tell what is around them: each class is one case (see ``fire.Fire``)."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from tests.swap.fire import Fire


class Prints(Fire):
    most_graphs = 4
    most_recompiles = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.print("step", batch_idx)
        print(f"loss {loss.item():.3f}")
        self.log("loss", loss)
        return loss


class Speaks(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        logging.getLogger("tests.fire").info("loss %s", loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("in the step", stacklevel=2)
        self.log("loss", loss)
        return loss


class Bar:
    def __init__(self) -> None:
        self.n = 0
        self.postfix: dict[str, Any] = {}

    def update(self, n: int) -> None:
        self.n += n

    def set_postfix(self, **values: Any) -> None:
        self.postfix.update(values)


class OwnBar(Fire):
    most_graphs = 4
    most_recompiles = 2

    def __init__(self) -> None:
        super().__init__()
        self.bar = Bar()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.bar.update(len(batch[0]))
        self.bar.set_postfix(loss=loss.item())
        self.note = (self.bar.n, self.bar.postfix["loss"])
        return loss


class Experiments(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("first", loss)
        self.logger.experiment.add_scalar("direct", loss, self.global_step)
        self.log("second", loss * 2)
        if batch_idx % 4 == 0:
            self.trainer.logger.experiment.add_scalar("rare", loss.item(), batch_idx)
        return loss


class ReadsTrainer(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        loss = self.loss(batch)
        if trainer.is_last_batch:
            loss = loss * 2
        progress = trainer.global_step / trainer.estimated_stepping_batches
        self.log("progress", progress)
        self.note = (trainer.global_step, trainer.current_epoch, trainer.max_epochs, trainer.training)
        return loss * (1 + 0.1 * progress + 0.1 * self.current_epoch)


class ReadsMoreOfTrainer(Fire):
    most_graphs = 6
    most_recompiles = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        trainer = self.trainer
        self.note = (type(trainer.callbacks[-1]).__name__, trainer.datamodule, trainer.num_training_batches)
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.log("lr", lr)
        self.note = (*self.note, self.lr_schedulers().get_last_lr()[0])
        return loss * (1 + lr)


class ReadsOptimizers(Fire):
    most_graphs = 2
    most_recompiles = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.note = self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"]
        return loss


class ReadsItself(Fire):
    most_graphs = 4

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.ones(3, device=self.device, dtype=self.dtype)
        loss = self.loss(batch) * self.hparams.scale * self.hparams["scale"] + noise.sum()
        gathered = self.all_gather(loss)
        self.log("loss", gathered.mean())
        return loss


class Counts(Fire):
    """Attributes of all kinds that are others at each step."""

    most_graphs = 2
    most_recompiles = 1

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch) * (1 + 0.01 * self.steps)
        self.log("steps", self.steps)
        return loss


class Average(Fire):
    """A float that follows the loss: a constant of the graph would be a wrong one, so it is soon given up."""

    captured = None
    most_graphs = 12
    most_recompiles = 12

    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.log("average", self.average)
        return loss / (1 + self.average)


class FloatSchedule(Fire):
    """A number that the step computes from itself is a constant of each graph: it is given up after a few."""

    captured = None
    most_graphs = 6
    most_recompiles = 6

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weight = self.weight * 0.9
        self.log("weight", self.weight)
        return self.loss(batch) * self.weight


class Grows(Fire):
    """A list and a dict that grow: Dynamo guards on their length."""

    most_graphs = 12
    most_recompiles = 12

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.table: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.history.append(loss.detach())
        self.table[self.global_step] = loss.detach()
        self.log("recent", torch.stack(self.history[-3:]).mean())
        return loss

    def on_train_end(self) -> None:
        self.seen += [self.history, self.table]


class ChangesForEver(Fire):
    """A step that is another one each time ends eagerly, after a bounded number of attempts."""

    most_graphs = most_recompiles = 8
    captured = False
    why = "(recompile limit)"
    options: ClassVar[dict[str, Any]] = {"max_epochs": 9}

    def __init__(self) -> None:
        super().__init__()
        self.name = "step 0"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.name = f"step {self.global_step}"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2.0 if self.name == "step -1" else 1.0)


class Outputs(Fire):
    """The old habit: outputs are collected and used at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Buffers(Fire):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.plain = torch.zeros(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.ema.mul_(0.9).add_(0.1 * loss.detach())
        self.count += 1
        self.plain[0] = loss.detach()
        self.plain = self.plain + 1
        self.log_dict({"ema": self.ema, "count": self.count, "plain": self.plain.sum()})
        return loss + self.ema


class Draws(Fire):
    most_graphs = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(1) * torch.bernoulli(torch.full_like(x, 0.5))
        x = F.dropout(x, 0.2)
        perm = torch.randperm(len(x))
        loss = F.cross_entropy(self(x[perm]), y[perm])
        self.log("loss", loss)
        return loss


class DrawsTwiceAlike(Fire):
    """Two views of a batch, as self-supervised training makes them."""

    most_graphs = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        one, other = x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)
        ones, others = torch.randint_like(y, 3), torch.randint_like(y, 3)
        self.note = (ones == others).float().mean(), (one - other).detach().square().mean()
        with torch.no_grad():
            target = self(one)
        return F.cross_entropy(self(other), y) + (self(other) - target).square().mean()


class DrawsInPython(Fire):
    most_graphs = 8
    most_recompiles = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.note = [random.random(), random.randint(0, 99), float(np.random.rand())]
        return loss * (1 + 0.1 * random.random())


class OwnGenerator(Fire):
    most_graphs = 6

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        self.note = self.generator.get_state().sum()
        return F.cross_entropy(self(x), y)


class LocalGenerator(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(batch_idx))
        return F.cross_entropy(self(x), y)
