"""What steps of other people's models do: draws, branches, contexts and side effects of many kinds."""

from __future__ import annotations

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
from tests.matrix.nets import SgdNet


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
    Cell(name="collects", model=Collects),
    Cell(name="anneals", model=Anneals),
    Cell(name="times itself", model=Times, auto=Expect(phase="settling")),
    Cell(name="tries", model=Tries),
    Cell(name="complex", model=Complex),
    Cell(name="scripted", model=Scripted, regions=Expect(phase="declined", reason="nothing to compile")),
    Cell(name="half of the batch", model=HalfOfTheBatch),
    Cell(name="unrolls", model=Unrolls),
    Cell(name="momentum", model=Momentum),
    Cell(name="queue", model=Queue),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
