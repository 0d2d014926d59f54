"""What steps of other people's models do: draws, branches, contexts and side effects of many kinds."""

from __future__ import annotations

import copy
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import AdamNet, SgdNet


class Variational(SgdNet):
    """A VAE by torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        hidden = self.inp(x)
        posterior = Normal(hidden, F.softplus(self.spread(hidden)) + 1e-3)
        z = posterior.rsample()
        for block in self.blocks:
            z = block(z)
        prior = Normal(torch.zeros_like(hidden), torch.ones_like(hidden))
        return F.mse_loss(z, x) + 0.1 * kl_divergence(posterior, prior).mean()


class PolicyGradient(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        policy = Categorical(logits=self(x))
        action = policy.sample()
        reward = (action == y).float()
        return -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()


class Gumbel(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        chosen = F.gumbel_softmax(self(x), tau=0.7, hard=True)
        other = torch.multinomial(F.softmax(self(x).detach(), -1), 1)
        return F.mse_loss(chosen, F.one_hot(y, 3).float()) + 0 * other.sum()


class Masks(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x * Bernoulli(probs=torch.full_like(x, 0.8)).sample(), y))


class ForksTheGenerator(SgdNet):
    """The same noise in each step, and nothing is drawn from the global generator."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            noise = torch.randn_like(x)
        return super().loss((x + 0.1 * noise, y))


class SeedsInTheStep(SgdNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        torch.manual_seed(batch_idx)
        return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)


class KeepsTheState(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        state = torch.get_rng_state()
        one = torch.randn_like(x)
        torch.set_rng_state(state)
        return super().loss((x + 0.1 * one + 0.1 * torch.randn_like(x), y))


class MorePython(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        order = list(range(8))
        random.shuffle(order)
        x = x[:, order] * random.choice([0.9, 1.0, 1.1]) + random.gauss(0, 0.1)
        x[:, random.sample(range(8), 2)] *= 0.5
        return super().loss((x, y))


class MoreNumpy(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        order = np.random.permutation(8)
        x = x[:, torch.from_numpy(order)] * np.random.choice([0.9, 1.1])
        return super().loss((x + torch.as_tensor(np.random.normal(0, 0.1, 8)).float(), y))


class SkipsSome(SgdNet):
    """A batch whose loss is large is left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if loss > 1.2 else loss


class Collects(SgdNet):
    """Outputs of an epoch are kept for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_epoch", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Anneals(SgdNet):
    """A weight that follows the number of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = min(1.0, self.global_step / 20)
        self.log("weight", weight)
        return weight * super().training_step(batch, batch_idx)


class Times(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = time.perf_counter()
        loss = super().training_step(batch, batch_idx)
        self.seconds.append(time.perf_counter() - start)
        return loss

    def on_train_end(self) -> None:
        assert len(self.seconds) == self.trainer.global_step
        assert all(s > 0 for s in self.seconds)
        assert len(set(self.seconds)) > 1
        self.seconds = []


class Tries(SgdNet):
    """An exception as a branch."""

    def loss(self, batch: Any) -> Tensor:
        try:
            self.check(batch[0])
        except ValueError:
            return super().loss((batch[0] * 0.5, batch[1]))
        return super().loss(batch)

    def check(self, x: Tensor) -> None:
        if x.mean() > 0:
            raise ValueError("too large")


class Complex(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        spectrum = torch.fft.fft(x)
        return super().loss((torch.fft.ifft(spectrum * torch.exp(0.1j * spectrum.abs())).real, y))


class ScriptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Scripted(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(ScriptedBlock()) for _ in range(2))


class HalfOfTheBatch(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        keep = x.norm(dim=1) > x.norm(dim=1).median()
        return super().loss((x[keep], y[keep]))


class Unrolls(SgdNet):
    """As many turns as the data says."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        while x.abs().max() > 2:
            x = x * 0.9
        return super().loss((x, y))


class Momentum(SgdNet):
    """A teacher that follows the student, as in BYOL and its like."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            for target, source in zip(self.teacher.parameters(), self.inp.parameters(), strict=True):
                target.lerp_(source, 0.1)
            wanted = self.teacher(batch[0])
        return super().loss(batch) + F.mse_loss(self.inp(batch[0]), wanted)


class Queue(SgdNet):
    """A queue of earlier batches with a pointer, as in MoCo."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        place = int(self.place)
        near = (self.inp(x) @ self.queue.clone().t()).logsumexp(1).mean()
        self.queue[place : place + len(x)] = x.detach()
        self.place[0] = (place + len(x)) % 24
        return super().loss(batch) + 0.01 * near


class NumpyScalars(SgdNet):
    """Numbers of numpy among those of torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = np.sqrt(np.float64(len(x))) / np.mean([1.0, 3.0])
        spread = float(np.percentile(x.detach().numpy(), 90) - x.numpy().min())
        self.log("spread", spread)
        return weight * super().training_step((x * np.float32(0.5) + np.float64(0.1), y), batch_idx) / spread


class NumpyMetrics(SgdNet):
    """Metrics and weights by numpy, from tensors and from its own generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        right = np.mean(logits.detach().argmax(1).numpy() == y.numpy())
        self.log("right", float(right))
        weights = np.random.rand(len(x))
        loss = (F.cross_entropy(logits, y, reduction="none") * torch.from_numpy(weights).float()).sum()
        self.log("loss_by_numpy", float(loss.detach().numpy()))
        return loss / float(np.sum(weights)) if weights.max() > 0.5 else loss


class NumpyConstants(SgdNet):
    """Numbers that are made of numbers, as in many a hand-written attention."""

    def forward(self, x: Tensor) -> Tensor:
        width = int(np.prod(self.inp.weight.shape[1:]))
        return super().forward(x / np.sqrt(width) * np.float32(1.5) + 0.01 * np.clip(width, 0, 2) * np.pi)


class ReversedGradients(SgdNet):
    """A hook on an intermediate tensor turns the gradient round, as for domain-adversarial training."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.inp(x)
        hidden.register_hook(lambda grad: -0.1 * grad)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden), y)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.share * grads[0], None


class OwnFunction(SgdNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        share = 2 / (1 + math.exp(-self.current_epoch)) - 1
        hidden = self.inp(x)
        loss = F.cross_entropy(self.head(self.blocks[0](hidden)), y)
        return loss + F.cross_entropy(self.head(Reverse.apply(hidden, share)), y)  # type: ignore[no-untyped-call]


class KeepsGradients(SgdNet):
    """The gradient of an intermediate tensor is read after the backward."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.hidden = self.inp(x)
        self.hidden.retain_grad()
        return F.cross_entropy(self.head(self.blocks[0](self.hidden)), y)

    def on_after_backward(self) -> None:
        assert self.hidden.grad is not None
        self.log("of_hidden", self.hidden.grad.abs().mean())


class Adversarial(SgdNet):
    """A step along the sign of the gradient, in the step itself (FGSM)."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = super().loss((x, y))
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + super().loss(((x + 0.1 * grad.sign()).detach(), y))


class PseudoLabels(AdamNet):
    """Labels by the model itself, in eval mode, in the middle of a step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        self.eval()
        with torch.no_grad():
            labels = self(x).argmax(1)
        self.train()
        return super().loss(batch) + 0.3 * F.cross_entropy(self(x), labels)


class CopiesItself(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        before = copy.deepcopy(self.inp)
        with torch.no_grad():
            before.weight.mul_(0.5)
        return super().loss(batch) + 0.1 * F.mse_loss(self.inp(x), before(x).detach())


class Freezes(SgdNet):
    """Parts are frozen and thawed from step to step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inp.requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


class ReturnsMore(SgdNet):
    """The outputs of a step are read in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        logits = self(x)
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits.detach(), "n": len(x), "name": "x", "none": None, "x": x}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["x"] is batch[0]
        assert (outputs["n"], outputs["name"], outputs["none"]) == (len(batch[0]), "x", None)
        self.log("right", (outputs["logits"].argmax(1) == batch[1]).float().mean())


class ReadsItsOptimizer(SgdNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("lr", lr)
        return super().training_step(batch, batch_idx) * (1 + lr)

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 / (1 + self.current_epoch)


class Cools(SgdNet):
    """An attribute that a hook changes for each epoch."""

    temperature = 1.0

    def on_train_epoch_start(self) -> None:
        self.temperature = 0.7**self.current_epoch

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x) / self.temperature, y)


class ChangesItsInput(SgdNet):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x.mul_(0.5).add_(0.1)
        y[0] = 1
        return super().loss((x, y))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", batch[0].sum())
        assert batch[1][0] == 1


class Tied(SgdNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].layer.weight = self.blocks[0].layer.weight


class Remembers(SgdNet):
    """A state that goes on from step to step, as in truncated backpropagation."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.inp(x)
        if self.state is not None:
            hidden = hidden + 0.5 * self.state
        self.state = hidden.detach()
        return F.cross_entropy(self.head(self.blocks[0](hidden)), y)


class Doubles(SgdNet):
    """The loss in 64 bit."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x).double()
        return (logits.logsumexp(1) - logits.gather(1, y[:, None])[:, 0]).mean().float()


CELLS = [
    Cell(name="variational", model=Variational),
    Cell(name="policy gradient", model=PolicyGradient),
    Cell(name="gumbel and multinomial", model=Gumbel),
    Cell(name="bernoulli masks", model=Masks),
    Cell(name="forks the generator", model=ForksTheGenerator),
    Cell(name="seeds in the step", model=SeedsInTheStep),
    Cell(name="keeps the state", model=KeepsTheState),
    Cell(name="more of Python's numbers", model=MorePython),
    Cell(name="more of numpy's numbers", model=MoreNumpy),
    Cell(name="skips some", model=SkipsSome),
    Cell(name="collects", model=Collects, trainer={"max_epochs": 6}),
    Cell(name="anneals", model=Anneals),
    Cell(name="times itself", model=Times),
    Cell(name="tries", model=Tries),
    Cell(name="complex", model=Complex),
    Cell(name="scripted", model=Scripted, regions=Expect(phase="declined", reason="nothing to compile")),
    Cell(name="half of the batch", model=HalfOfTheBatch),
    Cell(name="unrolls", model=Unrolls),
    Cell(name="momentum", model=Momentum),
    Cell(name="queue", model=Queue),
    Cell(name="numpy's scalars", model=NumpyScalars),
    Cell(name="numpy's metrics", model=NumpyMetrics),
    Cell(name="numpy's constants", model=NumpyConstants, options={"fullgraph": True}),
    Cell(name="reversed gradients", model=ReversedGradients),
    Cell(name="function of one's own", model=OwnFunction),
    Cell(name="keeps gradients", model=KeepsGradients),
    Cell(name="adversarial", model=Adversarial),
    Cell(name="pseudo-labels", model=PseudoLabels),
    Cell(name="copies itself", model=CopiesItself),
    Cell(
        name="freezes",  # Dynamo has an error of its own when the number of the batch becomes a symbol
        model=Freezes,
        auto=Expect(phase="settling"),
        regions=Expect(phase="settling"),
        options={"on_error": "eager"},
    ),
    Cell(name="returns more", model=ReturnsMore),
    Cell(name="reads its optimizer", model=ReadsItsOptimizer, auto=Expect(phase="settling")),
    Cell(name="cools", model=Cools, auto=Expect(phase="settling")),
    Cell(name="changes its input", model=ChangesItsInput),
    Cell(name="tied", model=Tied),
    Cell(name="remembers", model=Remembers),
    Cell(name="64 bit", model=Doubles),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
