"""What eager changes without a count is not counted for compiled code; what ``.data`` hides is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_hotcompile.swap.graphs.uncounted import HiddenWrites, not_counting, written_behind_autograd
from lightning_hotcompile.swap.parity.compare import compare
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

RECOMPUTES = "aot_eager_decomp_partition"
"""Computes in the backward what it can, as Inductor does, and so needs other tensors than eager."""


class Critic(nn.Module):
    """Two outputs that may have a backward each; its features are asked for alone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.head(features), features


class FeatureMatching(Net):
    """Runs a part of a block by itself, and then the block, before one backward."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.critic = Critic()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        alone = self.critic.features(x)
        scores, _ = self.critic(x + 0.1)
        return F.cross_entropy(scores, y) + (alone.mean(0) - 1).abs().mean()


class ByHand(FeatureMatching):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Thrice(ByHand):
    """A backward between calls of one block, as GANs have it: one call is eager's, the next compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        made = x + self.critic.head.weight.mean()
        real, _ = self.critic(x)
        first, _ = self.critic(made)
        self.manual_backward((real - first).square().mean(), retain_graph=True)
        again, _ = self.critic(made.detach())
        loss = F.cross_entropy(real, y) + again.square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_class", [FeatureMatching, ByHand, Thrice])
def test_statistics_of_a_part_that_ran_in_eager_may_change(model_class: type[Net], backend: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(backend=backend, compile_optimizer=False, scope="module", targets=["critic"])
    fit(plain)
    fit(model, [callback])
    assert any(region.proven for region in callback.report.regions), callback.report.to_text()
    assert_same(plain, model)


def test_a_change_that_eager_counts_stays_counted() -> None:
    def graph(x: Tensor, mean: Tensor, var: Tensor, steps: Tensor) -> tuple[Tensor]:
        steps.add_(1)
        return (F.batch_norm(x, mean, var, training=True),)

    def compiled(*args: Tensor) -> tuple[Tensor]:
        x, *statistics = args
        copies = [s.clone() for s in statistics]
        found = graph(x, *copies)
        for statistic, new in zip(statistics, copies, strict=True):
            statistic.copy_(new)
        return found

    inputs = [torch.randn(8, 3, requires_grad=True), torch.zeros(3), torch.ones(3), torch.zeros(())]
    parity = compare(graph, compiled, inputs)
    assert (parity.agrees, parity.changed, parity.uncounted) == (True, (3,), (1, 2))
    before = [t._version for t in inputs]
    not_counting(compiled, parity.uncounted)(*inputs)
    assert [t._version for t in inputs] == [*before[:3], before[3] + 1]


def test_after_an_error_too_and_not_where_nobody_counts() -> None:
    def fails(first: Tensor, second: Tensor) -> None:
        first.add_(1)
        second.add_(1)
        raise ZeroDivisionError

    counted = torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
        with pytest.raises(ZeroDivisionError):
            not_counting(fails, (0, 1))(counted, uncounted)
    assert counted._version == 0


class Noisy(nn.Module):
    """A layer of a Bayesian net: its noise is drawn into a buffer, behind autograd's back."""

    def __init__(self, breaks: bool, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.mean, self.scale = (nn.Parameter(torch.randn(8, 3) * 0.1) for _ in range(2))
        self.register_buffer("noise", torch.zeros(8, 3))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.noise.data = torch.randn(8, 3)
        noise = self.noise[:] if self.replaces else self.noise.data.normal_()[:]
        if self.breaks:
            torch._dynamo.graph_break()
        return x @ (self.mean + noise * F.softplus(self.scale))


class Sampled(Net):
    """Several samples, in graphs of their own, and one backward: eager's has the last noise for each."""

    def __init__(self, breaks: bool = False, replaces: bool = False) -> None:
        super().__init__(n_block=1)
        self.layer = Noisy(breaks, replaces)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return torch.stack([self.sample(x, y) for _ in range(3)]).mean()

    def sample(self, x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(self.layer(x), y)
        torch._dynamo.graph_break()
        return found


@pytest.mark.parametrize("breaks", [False, True])
def test_noise_that_is_drawn_into_data(breaks: bool) -> None:
    plain, model = (seeded(lambda: Sampled(breaks)) for _ in range(2))
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)
    assert not callback.report.regions[0].proven


class Penalised(Sampled):
    """A penalty on the weights that were drawn, in a graph that only reads the noise."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = []
        for _ in range(3):
            found.append(self.sample(x, y))
            found.append(self.penalty(self.layer.mean, self.layer.noise, self.layer.scale))
        return torch.stack(found).mean()

    def penalty(self, mean: Tensor, noise: Tensor, scale: Tensor) -> Tensor:
        deviation = torch.log1p(torch.exp(scale))
        drawn, variance = mean + deviation * noise, deviation**2
        found = ((variance - 1) / (2 * variance) * drawn**2 + mean / variance * drawn).sum()
        torch._dynamo.graph_break()
        return found


def test_noise_that_another_graph_reads_as_well() -> None:
    plain, model = seeded(Penalised), seeded(Penalised)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)


def test_a_graph_that_only_reads_what_another_one_writes_behind_autograd() -> None:
    hidden, x, noise = HiddenWrites(), torch.ones(4, 8), torch.zeros(8, 3)
    assert hidden.seen_by([x, noise], ()) == ()
    assert hidden.seen_by([x, noise], (1,)) == (1,)
    assert hidden.seen_by([noise[2:], 3, x, noise], ()) == (0, 3)


def test_noise_that_replaces_data() -> None:
    plain, model = (seeded(lambda: Sampled(replaces=True)) for _ in range(2))
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)
    assert not callback.report.regions[0].proven
    assert "its backward needs an input whose .data it replaces" in callback.report.reason


def test_what_a_backward_keeps_where_a_replaced_input_has_been_is_not_that_input() -> None:
    """The target of BYOL is replaced at the start of a step: its memory is free again for activations."""
    freed = []

    def eager(target: Tensor, x: Tensor) -> tuple[Tensor]:
        memory = StorageWeakRef(target.untyped_storage())
        target.data = target.data * 0.9
        freed.append(memory.expired())  # then the next line may be given this memory
        return (x.exp(),)

    inputs = [torch.ones(8, 8), torch.zeros(8, 8).requires_grad_()]
    parity = compare(eager, eager, inputs, behind_autograd=(0,))
    assert parity.agrees, parity
    assert parity.hidden == ()
    assert not any(freed)


def test_what_only_an_index_is_made_of_needs_no_input() -> None:
    """The codebook of a VQ-VAE, which it follows the batches with: the nearest code has no backward."""

    def eager(codes: Tensor, x: Tensor) -> tuple[Tensor]:
        nearest = (x @ codes).exp().argmax(1)
        found = codes.detach()[nearest]
        codes.data.lerp_(x.detach(), 0.1)
        return ((x - found).square().mean(),)

    inputs = [torch.randn(8, 8), torch.randn(8, 8).requires_grad_()]
    parity = compare(eager, eager, inputs, behind_autograd=(0,))
    assert (parity.agrees, parity.hidden) == (True, ())


class Gate(Net):
    """What the loss has used is held in its range in the same step: compiled code would need it as it was."""

    def __init__(self, kind: Callable[[Tensor], Tensor], by_data: bool) -> None:
        super().__init__(n_block=1)
        self.gate = kind(torch.tensor(1.5))
        self.by_data = by_data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x) * torch.sigmoid(self.gate), y)
        if self.by_data:
            self.gate.data.clamp_(max=0.3)
        else:
            with torch.no_grad():
                self.gate.clamp_(max=0.3)
        return loss


@pytest.mark.parametrize(
    ("kind", "by_data", "backend"),
    [
        *((kind, by_data, RECOMPUTES) for kind in (nn.Parameter, nn.Buffer) for by_data in (False, True)),
        pytest.param(nn.Parameter, True, "inductor", marks=pytest.mark.slow),
        pytest.param(nn.Buffer, False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_what_is_used_and_then_written_in_one_graph(
    kind: Callable[[Tensor], Tensor], by_data: bool, backend: str
) -> None:
    plain, model = (seeded(lambda: Gate(kind, by_data)) for _ in range(2))
    callback = hot(backend=backend, scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-5)


class Cooled(Net):
    """A temperature that is lowered in the step, later in the run, and then used by the loss."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.register_buffer("temperature", torch.ones(3))
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps.add_(1)
        self.temperature.mul_(torch.where(self.steps > 10, 0.7, 1.0))
        return F.cross_entropy(self(x) * self.temperature, y)


@pytest.mark.parametrize("backend", [RECOMPUTES, pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_written_and_then_used_in_one_graph(backend: str) -> None:
    plain, model = seeded(Cooled), seeded(Cooled)
    callback = hot(backend=backend, scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-5)
    if backend == "inductor":  # it saves the temperature itself, and not what it makes of it
        assert "writes to an input that its backward needs as it was" in callback.report.reason
    else:
        assert_proven(callback.report)


class OnceMore(Net):
    """Noise is drawn once a step, and from the tenth on once more, without gradients, before the backward."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.layer = Noisy(breaks=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layer(x), y)
        torch._dynamo.graph_break()
        if self.global_step > 10:
            with torch.no_grad():
                self.layer(x)
        return loss


def test_noise_that_is_drawn_once_more_in_later_steps() -> None:
    plain, model = seeded(OnceMore), seeded(OnceMore)
    callback = hot(scope="module", targets=["layer"], compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)


class Codebook(Net):
    """As in VQ-VAE: distances that only choose, a codebook that follows what was chosen."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.register_buffer("book", torch.randn(3, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self(x)
        chosen = (scores @ self.book).argmax(1)
        hot_ones = F.one_hot(chosen, 6).float()
        self.book.data.copy_(0.9 * self.book + 0.1 * scores.detach().t() @ hot_ones)
        return F.cross_entropy(scores, y) + (scores - F.embedding(chosen, self.book.t())).square().mean()


class Clipped(Net):
    """As in WGAN: weights are held in their range through ``.data``, and then used."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.head.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return self.loss(batch)


@pytest.mark.parametrize("model_class", [Codebook, Clipped])
def test_what_is_as_it_was_until_the_backward_is_compiled(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain)
    fit(model, [callback])
    assert callback.report.regions[0].proven, callback.report.to_text()
    assert_same(plain, model)


def by_data(weight: Tensor) -> None:
    weight.data.normal_()


def by_a_part(weight: Tensor) -> None:
    weight.data[1:].t()[0].zero_()


def by_an_index(weight: Tensor) -> None:
    weight.data[1] = 3.0


def by_an_operator(weight: Tensor) -> None:
    data = weight.data
    data += 1


def by_init(weight: Tensor) -> None:
    nn.init.uniform_(weight.data)


def by_out(weight: Tensor) -> None:
    torch.add(weight.detach(), 1, out=weight.data)


def by_inplace(weight: Tensor) -> None:
    F.relu(weight.data, inplace=True)


def in_the_open(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def of_a_copy(weight: Tensor) -> None:
    (weight.data * 2).add_(1)


def only_read(weight: Tensor) -> None:
    weight.data.sum()


def by_another(weight: Tensor) -> None:
    weight.data = torch.ones_like(weight)


WRITES = [by_another, by_data, by_a_part, by_an_index, by_an_operator, by_init, by_out, by_inplace]


@pytest.mark.parametrize(
    ("change", "found"), [*((write, 1) for write in WRITES), (in_the_open, 0), (of_a_copy, 0), (only_read, 0)]
)
def test_writes_through_data_are_found_in_the_graph(change: Callable[[Tensor], None], found: int) -> None:
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def step(x: Tensor, weight: Tensor) -> Tensor:
        change(weight)
        return x * weight

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    weight = torch.ones(2, 2)
    torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2, 2, requires_grad=True), weight)
    ((graph, inputs),) = graphs
    places = written_behind_autograd(graph)
    assert [inputs[i] is weight for i in places] == [True] * found


def test_an_average_of_weights_by_data_is_compiled() -> None:
    """The teacher of BYOL and MoCo: its own backward needs nothing of what is written."""

    class Teacher(Net):
        def __init__(self) -> None:
            super().__init__(n_block=1)
            self.student, self.teacher = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            return F.cross_entropy(self.student(x) + self.teacher(x), y)

    plain, model = seeded(Teacher), seeded(Teacher)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain)
    fit(model, [callback])
    assert callback.report.regions[0].proven
    assert_same(plain, model)
