"""Gradients of compiled code: none where no loss uses an output, and each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hotcompile.swap.graphs.backward import BackwardAsEager
from lightning_hotcompile.swap.graphs.running import RUNS_WATCHED
from lightning_hotcompile.swap.parity.reach import reach_of
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Net, fit, make_trainer, seeded


class WithSpare(Net):
    """A second head whose loss comes with the third epoch; the optimizer takes off what has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.seen: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        main, spare = self.body(x)
        loss = F.cross_entropy(main, y)
        if self.current_epoch >= 2:
            loss = loss + F.cross_entropy(spare, y)
        self.log("loss", loss)
        return {"loss": loss, "main": main, "spare": spare}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.body.parameters(), lr=1e-2, weight_decay=0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.body.spare.weight.grad is None)


class Body(nn.Module):
    """Two heads; the second one changes what it is given, and is a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.main, self.spare = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.shared(x))
        return self.main(h), (self.spare(h) * self.scale).view(-1, 3)


class AcrossABreak(WithSpare):
    """What the loss does not use lives on after a graph break."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        main, spare = self.body(x)
        torch._dynamo.graph_break()
        loss = F.cross_entropy(main, y)
        if self.current_epoch >= 2:
            loss = loss + F.cross_entropy(spare, y)
        return loss


class PassesOn(WithSpare):
    """The second graph returns what the first one has made, as a view, and uses a weight of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(self.body.shared(x))
        torch._dynamo.graph_break()
        made = h.flatten(1)
        h = h + torch.tanh(self.body.shared(x))
        main, spare = self.body.main(h), self.body.spare(h) * self.body.scale
        loss = F.cross_entropy(main, y)
        if self.current_epoch >= 2:
            loss = loss + F.cross_entropy(spare, y)
        return {"made": made, "loss": loss, "spare": spare}


class ByHand(WithSpare):
    """Manual optimization, and a backward for each of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        main, spare = self.body(x)
        self.manual_backward(F.cross_entropy(main, y), retain_graph=True)
        if self.current_epoch >= 2:
            self.manual_backward(F.cross_entropy(spare, y))
        optimizer.step()


WITHOUT_INDUCTOR = [(WithSpare, "module"), (WithSpare, "auto"), (AcrossABreak, "step")]
ALSO_BY_IT = [(WithSpare, "step"), (AcrossABreak, "module"), (PassesOn, "step"), (ByHand, "module")]


@pytest.mark.parametrize(
    ("model_class", "scope", "backend"),
    [
        *((*each, "aot_eager") for each in (*WITHOUT_INDUCTOR, *ALSO_BY_IT)),
        *(pytest.param(*each, "inductor", marks=pytest.mark.slow) for each in ALSO_BY_IT),
    ],
)
def test_a_training_is_as_without_the_callback(
    model_class: type[WithSpare], scope: str, backend: str
) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, backend=backend, compile_optimizer=False)
    options: dict[str, Any] = {"max_epochs": 4}
    first = fit(plain, **options)
    second = fit(model, [callback], **options)
    assert plain.seen == [True] * 24 + [False] * 24
    assert model.seen == plain.seen
    assert_same(plain, model, tolerance=1e-4)
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (first, second)]
    assert [float(s["step"]) for s in states[0].values()] == [float(s["step"]) for s in states[1].values()]
    assert [region for region in callback.report.regions if region.proven], callback.report.reason


class ActorAndCritic(Net):
    """Two towers in one module, each with a loss, a backward and an optimizer of its own."""

    def __init__(self, *, keep: bool = False) -> None:
        super().__init__()
        self.body, self.keep = Towers(shared=keep), keep
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]
        logits, value = self.body(x)
        first.zero_grad()
        self.manual_backward(F.cross_entropy(logits, y), retain_graph=self.keep)
        first.step()
        second.zero_grad()
        self.manual_backward(value.square().mean())
        second.step()

    def configure_optimizers(self) -> Any:
        parts = (self.body.actor, self.body.critic)
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in parts], []


class Towers(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8) if shared else nn.Identity()
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.actor(h), self.critic(h)


@pytest.mark.parametrize("keep", [False, True])
def test_each_output_may_have_a_backward_of_its_own(keep: bool) -> None:
    plain, model = seeded(ActorAndCritic, keep=keep), seeded(ActorAndCritic, keep=keep)
    callback = hot(scope="module", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert "its outputs have backwards of their own" in callback.report.to_text()


class Probed(nn.Module):
    """A layer, and a linear probe on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.probe = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layer(x))
        return h, self.probe(h.detach())


class LinearProbes(Net):
    """Blocks that run one graph more often than runs are looked at, all before the first backward."""

    def __init__(self) -> None:
        super().__init__(width=8, n_block=0)
        self.blocks = nn.ModuleList(Probed() for _ in range(RUNS_WATCHED + 3))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        x, probes = self.inp(x), []
        for block in self.blocks:
            x, probe = block(x)
            probes.append(F.cross_entropy(probe, y))
        self.manual_backward(F.cross_entropy(self.head(x), y))
        self.manual_backward(torch.stack(probes).sum())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_so_may_each_output_of_many_equal_blocks() -> None:
    plain, model = seeded(LinearProbes), seeded(LinearProbes)
    callback = hot(scope="regions", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert "its outputs have backwards of their own" in callback.report.to_text()


class Auxiliary(Net):
    """Automatic optimization of one tower; the step trains the other one itself."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.body = Towers(shared=False)
        self.second = torch.optim.SGD(self.body.critic.parameters(), lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits, value = self.body(x)
        self.second.zero_grad()
        value.square().mean().backward()
        self.second.step()
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.actor.parameters(), lr=1e-2)


@pytest.mark.parametrize("scope", ["module", "auto"])
def test_a_step_may_have_a_backward_beside_the_trainers(scope: str) -> None:
    plain, model = seeded(Auxiliary), seeded(Auxiliary)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert callback.report.regions
    assert not any(region.proven for region in callback.report.regions)
    name = "body" if scope == "module" else "training_step"
    reason = "its outputs have backwards of their own, and one frees or changes what another needs"
    assert f"region {name} did not run compiled: {reason}" in callback.report.notes


class Windows(Net):
    """Two views of one series, one of which is changed in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, later = batch
        x.mul_(0.5)
        return F.mse_loss(self.head(self.inp(x)), later[:, :3])

    def train_dataloader(self) -> Any:
        series = torch.arange(400.0).sin().view(50, 8)
        windows = [(series[i : i + 4], series[i + 1 : i + 5]) for i in (3, 9, 0, 20, 31, 5, 40, 16, 11, 2)]
        return DataLoader(windows, batch_size=None)  # type: ignore[arg-type]


def test_inputs_that_share_what_is_changed_are_left_to_eager() -> None:
    plain, model = seeded(Windows), seeded(Windows)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    for each, callbacks in ((plain, []), (model, [callback])):
        torch.manual_seed(1)
        make_trainer(callbacks).fit(each)
    assert_same(plain, model)
    assert "an input is changed that may share memory with another" in callback.report.to_text()


class Distances(Net):
    """What is returned beside the loss has no derivative at some places, which eager does not ask for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.inp(x)
        logits = self.head(h)
        apart = (h[:, None] - h[None]).pow(2).sum(-1).sqrt()
        return {"loss": F.cross_entropy(logits, y), "apart": apart}


class Normed(torch.autograd.Function):
    """A backward of the user's that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class OwnBackward(Net):
    """It is not asked for, since the loss does not use its output."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.inp(x)
        return {"loss": F.cross_entropy(self.head(h), y), "side": Normed.apply(h).sum()}


@pytest.mark.parametrize("model_class", [Distances, OwnBackward])
def test_no_gradient_becomes_nan(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert_same(plain, model)
    assert "an output that is not used would change gradients" in callback.report.to_text()


class Signal(Net):
    """Returns what has no derivative for a target that is silent, as it is in one late batch."""

    weight = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.inp(x)
        noise = (h[:, 0] - y).square().sum()
        ratio = 10 * torch.log10(y.float().square().sum() / noise)
        return {"loss": F.cross_entropy(self.head(h), y) + self.weight * noise, "sdr": ratio, "half": h / 2}


class SpareRoot(Signal):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"loss": self.loss(batch), "rms": (y * self.inp(x)[:, 0]).square().mean().sqrt()}


class SpareQuotient(Signal):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hits = y > 0
        return {"loss": self.loss(batch), "mean": (self.inp(x)[:, 0] * hits).sum() / hits.sum()}


def silent_late() -> DataLoader[Any]:
    """Batches with classes 1 and 2, and one, long after the flip, of class 0 alone."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 8, generator=generator), torch.randint(1, 3, (200,), generator=generator)
    y[160:168] = 0
    return DataLoader(TensorDataset(x, y), 8)


@pytest.mark.parametrize("model_class", [Signal, SpareRoot, SpareQuotient])
def test_no_gradient_becomes_nan_in_a_later_batch(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain, train=silent_late())
    fit(model, [callback], train=silent_late())
    assert all(weight.isfinite().all() for weight in plain.parameters())
    assert_same(plain, model)
    assert "an output that is not used may have no finite derivative" in callback.report.to_text()


class AllUsed(Net):
    """Its loss goes by the same root and quotient as what it returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.inp(x)
        apart = (h[:, 0] - y).square().mean().sqrt() / h.square().mean()
        return {"loss": self.loss(batch) + apart, "apart": apart, "square": h**2}


class Heads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits, "p": logits.softmax(-1) / 2}


@pytest.mark.parametrize("model_class", [AllUsed, Heads])
def test_what_is_returned_beside_the_loss_may_be_compiled(model_class: type[Net]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)


class Added(Net):
    """One gradient goes to two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        added = (self.first + self.second.unsqueeze(0)).expand(x.shape[0], -1)
        return super().forward(x + added)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_no_two_gradients_share_memory(options: dict[str, Any], backend: str) -> None:
    plain, model = seeded(Added), seeded(Added)
    callback = hot(scope="step", backend=backend, compile_optimizer=False)
    fit(plain, **options)
    fit(model, [callback], **options)
    assert_same(plain, model)
    (region,) = callback.report.regions
    assert region.proven
    memory = [p.grad.untyped_storage().data_ptr() for p in (model.first, model.second) if p.grad is not None]
    assert len(set(memory)) == len(memory)


class Taught(Net):
    """Has a teacher whose weights want a gradient and get none; a hook on one of them tells of each."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.stopped = nn.Linear(8, 3), nn.Linear(8, 3)
        self.seen: list[str] = []
        for part in (self.teacher, self.stopped):
            part.weight.register_hook(lambda gradient: self.seen.append("gradient") or 2 * gradient)
            part.bias.register_post_accumulate_grad_hook(lambda _: self.seen.append("accumulated"))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return super().forward(x) + taught + self.stopped(x).detach()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_hook_is_called_for_weights_that_no_backward_comes_to(backend: str) -> None:
    """Autograd called it with None for a gradient, and the training ended."""
    plain, model = seeded(Taught), seeded(Taught)
    callback = hot(scope="step", compile_optimizer=False, backend=backend)
    fit(plain)
    fit(model, [callback])
    assert plain.seen == model.seen == []
    assert_proven(callback.report)
    assert_same(plain, model)


def two_of_three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (a * b).sum(), (b * c).exp(), c.detach() * a


def leaves() -> list[Tensor]:
    return [torch.arange(1.0, 4.0).requires_grad_() for _ in range(3)]


def test_which_inputs_an_output_depends_on() -> None:
    inputs = leaves()
    outputs = two_of_three(*inputs)
    reach = reach_of(outputs, dict(enumerate(inputs)))[0]
    assert reach == {0: {0, 2}, 1: {0, 1}, 2: {1}}


def test_which_inputs_no_backward_comes_to() -> None:
    a, b, c = given = leaves()
    outputs = [(a * b.detach()).sum(), c]
    assert reach_of(outputs, dict(enumerate(given)))[1] == (1,), "what is an output itself stays as it is"
    assert reach_of([b.detach(), c], dict(enumerate(given)))[1] == (), "there is none"


def test_one_output_leaves_nothing_open() -> None:
    inputs = leaves()
    assert reach_of([two_of_three(*inputs)[0]], dict(enumerate(inputs)))[0] == {}


def used(*places: int) -> Callable[[tuple[Tensor, ...]], Tensor]:
    return lambda outputs: sum((outputs[place].sum() for place in places), torch.zeros(()))


@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("leaf", [True, False], ids=["leaves", "results"])
def test_gradients_are_those_of_eager(places: tuple[int, ...], leaf: bool) -> None:
    compiled = torch.compile(two_of_three, backend="aot_eager", fullgraph=True)
    inputs = leaves()
    reach = reach_of(two_of_three(*inputs), dict(enumerate(inputs)))[0]
    found = []
    for function in (two_of_three, BackwardAsEager(compiled, reach)):
        for _ in range(2):  # the second time it knows which is which
            wanted = leaves()
            given = wanted if leaf else [t * 2 for t in wanted]
            loss = used(*places)(function(*given))
            found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    for first, second in zip(found[0], found[3], strict=True):
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            torch.testing.assert_close(first, second)


def test_a_run_without_gradients_is_left_alone() -> None:
    compiled = BackwardAsEager(torch.compile(two_of_three, backend="aot_eager"), {0: frozenset({0, 2})})
    with torch.no_grad():
        outputs = compiled(*leaves())
    assert not any(output.requires_grad for output in outputs)
    loss = compiled(*(inputs := leaves()))[1].sum()
    assert torch.autograd.grad(loss, inputs, allow_unused=True)[0] is None


class BranchInGraphs(Net):
    """A branch that the loss does not use goes through several graphs; its weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        side = self.branch[0](x)
        torch._dynamo.graph_break()
        side = self.branch[1](side.sin())
        torch._dynamo.graph_break()
        self.aside = self.branch[2](side)
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_branch_that_is_not_used_has_no_gradient_in_any_graph(backend: str) -> None:
    """A graph that gives no gradient to what an earlier one has made had the earlier one give zeros."""
    plain, model = seeded(BranchInGraphs), seeded(BranchInGraphs)
    callback = hot(scope="step", compile_optimizer=False, backend=backend)
    fit(plain)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert region.graphs == 3
    assert [p.grad for p in model.branch.parameters()] == [p.grad for p in plain.branch.parameters()]
    assert_proven(callback.report)
    assert_same(plain, model)


class Masked(Net):
    """What an earlier graph has made is written to in a later one, of which no output depends on it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = torch.zeros(len(x), 3, 1)
        scores[:, :, 0] = self(x)
        scores = scores.squeeze(2)
        torch._dynamo.graph_break()
        scores.masked_fill_(F.one_hot((y + 1) % 3, 3).bool(), -5.0)
        size = self.head.weight.square()
        torch._dynamo.graph_break()
        return F.cross_entropy(scores, y) + size.mean()


class Scaled(Net):
    """A weight that no output depends on, but what another graph has made, and this one writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self(x) * 2
        torch._dynamo.graph_break()
        scores.add_(self.scale)
        size = self.head.weight.square()
        torch._dynamo.graph_break()
        return F.cross_entropy(scores, y) + size.mean()


def test_a_weight_in_what_is_written_to_an_input_has_its_gradient() -> None:
    plain, model = seeded(Scaled), seeded(Scaled)
    callback = hot(**STEP)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
    assert not torch.equal(model.scale, seeded(Scaled).scale)


def test_an_input_that_is_written_to_has_its_gradient() -> None:
    plain, model = seeded(Masked), seeded(Masked)
    callback = hot(**STEP)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
