"""Steps with hostile tensor code: each class is one case (see ``fire.Fire``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.swap.fire import Fire


class GradientPenalty(Fire):
    """Double backward inside of the step."""

    captured = None
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_(True)
        loss = F.cross_entropy(self(x), batch[1])
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = grad.norm(2, dim=1).sub(1).pow(2).mean()
        self.log("penalty", penalty)
        return loss + 0.1 * penalty


class DoubleBackwardOutside(Fire):
    """The second derivative is taken of what compiled code returned."""

    captured = None
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        grads = torch.autograd.grad(loss, list(self.head.parameters()), create_graph=True)
        (loss + 0.01 * sum(g.pow(2).sum() for g in grads)).backward()


class BackwardTwice(Fire):
    """Two passes through the graph that compiled code returned."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()


class Checkpoints(Fire):
    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = F.cross_entropy(self.head(x), batch[1])
        self.log("loss", loss)
        return loss


class Transforms(Fire):
    captured = None  # parity may not be able to compare it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        squares = torch.func.vmap(lambda row: (row * row).sum())(batch[0])
        slope = torch.func.grad(lambda s: (s * self.head.weight).sum())(torch.ones(()))
        return loss + 0.01 * squares.mean() + 0.01 * slope


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() * 0.5  # not the true derivative: it shows whether this one was used


class OwnFunction(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Double.apply(self.loss(batch) * 0.3)


class DynamicShapes(Fire):
    most_graphs = 8
    most_recompiles = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        picked = logits[batch[1] > 0]
        rows = torch.nonzero(batch[1] == 0).squeeze(1)
        self.log("picked", float(len(picked)))
        return picked.pow(2).mean() + logits[rows].abs().sum() * 0.1


class Sparse(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index = torch.stack([torch.arange(8), batch[1]])
        one_hot = torch.sparse_coo_tensor(index, torch.ones(8), (8, 3))
        return -torch.sparse.mm(one_hot.t(), self(batch[0]).log_softmax(1)).diagonal().sum() / 8


class ThroughNumpy(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = np.exp(-np.abs(batch[0].numpy()).mean(axis=1)).astype(np.float32)
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (each * torch.from_numpy(weights)).mean()


class Rearranges(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pattern = "bi,bj->ij"
        gram = torch.einsum(pattern, batch[0], batch[0])
        left, _, right = pattern.partition("->")
        self.log(left.upper() + right, gram.mean())
        return self.loss(batch)


class CallsValidation(Fire):
    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class ChangesMode(Fire):
    most_graphs = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].drop.p = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.eval()
        with torch.no_grad():
            target = self(batch[0])
        self.train()
        loss = self.loss(batch)
        self.log("gap", (target - self(batch[0])).abs().mean())
        return loss


class Freezes(Fire):
    most_graphs = 8
    most_recompiles = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inp.requires_grad_(batch_idx % 2 == 0)
        return self.loss(batch)


class Toggles(Fire):
    most_graphs = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head.weight.requires_grad_(False)
        fixed = self.loss(batch)
        self.head.weight.requires_grad_(True)
        return self.loss(batch) + 0.1 * fixed


class HookChanges(Fire):
    most_graphs = 4
    most_recompiles = 3

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature = 1.0 + 0.01 * batch_idx
        self.mode = "hard" if batch_idx > 6 else "soft"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.temperature
        return loss if self.mode == "soft" else loss * 2


class Formats(Fire):
    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.note = f"{loss.item():.2f} {batch[0].shape} {batch_idx:03d}"
        self.log("loss", loss)
        return loss


class Inspects(Fire):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch if isinstance(batch, (list, tuple)) else (batch["x"], batch["y"])
        loss = F.cross_entropy(self(x), y)
        if hasattr(self, "no_such_thing") or callable(getattr(self, "criterion", None)):
            return loss * 2
        return loss if type(self).__name__ == "Inspects" else None


class Lazy(Fire):
    """Submodules and buffers that are made in a step."""

    most_graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(8, 8)
            self.register_buffer("ones", torch.ones(8))
        return F.cross_entropy(self(self.extra(batch[0]) + self.ones), batch[1])


class LazyLate(Fire):
    """The same, at a step that compiled code runs."""

    most_graphs = 4
    most_recompiles = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.global_step >= 7:
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(8, 8)
            x = self.extra(x)
        return F.cross_entropy(self(x), batch[1])


class Recurses(Fire):
    most_graphs = 3

    def depth(self, x: Tensor, n: int) -> Tensor:
        return x if n == 0 else self.depth(torch.tanh(x), n - 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(self.depth(batch[0], 4)), batch[1])


class CallsItsStep(Fire):
    """The step calls ``training_step`` of its own object: the swapped one."""

    most_graphs = 4

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.inside:
            self.inside = True
            loss = self.training_step(batch, batch_idx)
            self.inside = False
            self.log("outer", loss)
            return loss * 2
        loss = self.loss(batch)
        self.log("inner", loss)
        return loss


class ChangesWeights(Fire):
    """Weights are changed in the step itself, as for weight clipping or a spectral norm by hand."""

    most_graphs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.weight.clamp_(-0.3, 0.3)
            self.inp.weight.data.mul_(0.999)
        return self.loss(batch)


class BackwardInside(Fire):
    """An extra backward pass of its own, into the same gradients."""

    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (0.1 * self.head(self.inp(batch[0])).pow(2).mean()).backward()
        loss = self.loss(batch)
        self.log("grad", self.head.weight.grad.norm())
        return loss


class HooksATensor(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        out.register_hook(lambda grad: grad * 0.5)
        return F.cross_entropy(out, batch[1])


class StopsTraining(Fire):
    most_graphs = 6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step >= 14:
            self.trainer.should_stop = True
        self.log("loss", loss)
        return loss


class KeepsOutput(Fire):
    """An output with its graph is kept and read in a later hook."""

    most_graphs = 4
    most_recompiles = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logits = self(batch[0])
        return F.cross_entropy(self.logits, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("kept", self.logits.detach().mean())
        del self.logits
