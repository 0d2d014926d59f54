"""A step may change what compiled code would need in its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hotcompile.swap.graphs import saved_inputs
from lightning_hotcompile.swap.graphs.graph import Graph, Watch
from lightning_hotcompile.swap.graphs.running import RUNS_WATCHED, GraphAtWork
from lightning_hotcompile.swap.graphs.saved_inputs import can_be_copied, watch_until_backward, with_copies
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.verdict import Parity
from tests.hot import assert_compiled_as_eager
from tests.models import Net, seeded


class Queue(Net):
    """Keys of earlier batches, copied for the loss and written to after a graph break, as in MoCo."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.register_buffer("queue", F.normalize(torch.randn(32, 3)))
        self.place = nn.Buffer(torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        key = F.normalize(self(batch[0]))
        against = key @ self.queue.clone().detach().t()
        loss = F.cross_entropy(
            torch.cat([(key * key.roll(1, 0)).sum(1, keepdim=True), against], 1) / 0.2, self.first
        )
        with torch.no_grad():
            place = int(self.place)
            self.write(place, key)
            self.place[0] = (place + len(key)) % 32
        return loss

    def write(self, place: int, key: Tensor) -> None:
        self.queue[place : place + len(key)] = key.detach()

    @property
    def first(self) -> Tensor:
        return torch.zeros(8, dtype=torch.long)


class Unseen(Queue):
    """Written to in a way that no version counts: eager is right, and nobody would raise."""

    def write(self, place: int, key: Tensor) -> None:
        self.queue.data[place : place + len(key)] = key.detach()


class Rarely(Queue):
    """The first steps leave the queue as it is."""

    def write(self, place: int, key: Tensor) -> None:
        if self.global_step >= 20:
            super().write(place, key)


class Frozen(Queue):
    """A queue that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        queue = self.queue
        del self.queue
        self.queue = nn.Parameter(queue, requires_grad=False)


class Temperature(Net):
    """As in CLIP: computed anew in the backward, and held in its range by a hook before the backward."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.scale.exp() * self(x), y)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6)


class UnseenTemperature(Temperature):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.scale.data.clamp_(0, 0.52)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_class", [Queue, Unseen, Rarely, Frozen, Temperature, UnseenTemperature], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("scope", ["step", "auto"])
def test_the_training_goes_on_and_is_compiled(model_class: type[Queue], scope: str) -> None:
    assert_compiled_as_eager(model_class, scope=scope)


@pytest.mark.slow
def test_compiled_by_hand_it_raises() -> None:
    """What all this is for; once torch does otherwise it can go."""
    model = seeded(Queue)
    step = torch.compile(model.training_step)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step([torch.randn(8, 8), None], 0).backward()


def eager(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return ((x.exp() * w).sum(),)


def test_the_comparison_tells_what_only_the_compiled_backward_needs() -> None:
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (x.exp() * w).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            (x,) = ctx.saved_tensors
            return None, x.exp() * gradient

    def compiled(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (Recomputed.apply(x, w),)

    given = [torch.ones(4), torch.ones(4, requires_grad=True)]
    assert compare(eager, compiled, given).needed == (0,)
    assert compare(eager, eager, given).needed == ()
    assert compare(compiled, compiled, given).needed == ()


@pytest.mark.parametrize("memory", ["enough", "short"])
@pytest.mark.parametrize("change", ["none", "in place", "data", "to what it was"])
def test_the_backward_finds_what_was_changed(
    change: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "short":
        monkeypatch.setattr(saved_inputs, "why_memory_is_short", lambda tensors, copies: "none is free")
    found: list[frozenset[int]] = []
    x, w = torch.tensor([1.0, 1.0, float("nan")]), torch.ones(3, requires_grad=True)
    one, other = w * 2, w * 3
    assert watch_until_backward({0: x}, [one, other, None], found.append)
    if change == "in place":
        x.add_(1)
    if change == "data":
        x.data.add_(1)
    if change == "to what it was":
        x.clamp_(0, 5)
    (one + other).sum().backward()
    is_unseen = change == "none" or (change == "data" and memory == "short")
    assert found == [frozenset() if is_unseen else frozenset({0})]


def test_nothing_of_a_step_is_kept_after_its_backward() -> None:
    x, w = torch.ones(3) * 2, torch.ones(3, requires_grad=True)
    kept, y = weakref.ref(x), w * 2
    assert watch_until_backward({0: x}, [y], lambda _: None)
    x.add_(1)
    y.sum().backward()
    del x
    assert kept() is None


def at_work(
    needed: tuple[int, ...], given: Callable[[Tensor], None] = lambda x: None, **parity: Any
) -> tuple[Callable[..., Any], list[str]]:
    """A graph whose compiled code, which needs these inputs, tells when it runs; the first run is over."""
    captured, ran = torch.fx.symbolic_trace(lambda x, w: ((x * w).sum(),)), list[str]()

    def compiled(x: Tensor, w: Tensor) -> tuple[Tensor]:
        ran.append("compiled")
        given(x)
        return ((x * w).sum(),)

    graph = Graph(region="one", n_ops=2)
    work = GraphAtWork(
        graph, captured, compiled, Watch(parity="auto"), lambda _: pytest.fail("not asked for")
    )
    graph.parity = Parity(agrees=True, needed=needed, **parity)
    graph.unwatched = "not here"
    work._fixed = frozenset(graph.parity.changed)
    work._instead = work._before_a_backward
    return work.entry(), ran


def test_eager_answers_until_the_first_backward() -> None:
    run, ran = at_work((0,))
    w = torch.ones(3, requires_grad=True)
    for _ in range(2):
        run(torch.ones(3), w)
    (loss,) = run(torch.ones(3), w)
    assert not ran
    loss.backward()
    run(torch.ones(3), w)
    assert ran == ["compiled"]


class Both(torch.autograd.Function):
    """Saves the sum, where eager saves what is made of it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = a + b
        ctx.save_for_backward(h)
        return h, h.sigmoid() * h.tanh()

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor, of_gate: Tensor) -> tuple[Tensor, Tensor]:
        (h,) = ctx.saved_tensors
        s, t = h.sigmoid(), h.tanh()
        gradient = of_sum + of_gate * (s * (1 - s) * t + s * (1 - t * t))
        return gradient, gradient


def sum_and_gate(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = a + b
    return h, h.sigmoid() * h.tanh()


@pytest.mark.parametrize("changes", [False, True])
def test_an_output_that_is_changed_before_the_backward_leaves_it_to_eager(changes: bool) -> None:
    captured, graph = torch.fx.symbolic_trace(sum_and_gate), Graph(region="one", n_ops=4)
    watch = Watch(parity="auto")
    run = GraphAtWork(graph, captured, Both.apply, watch, lambda _: pytest.fail("not asked for")).entry()
    expected = torch.ones(3, requires_grad=True)
    for _ in range(3):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3)
        for function, leaf in ((run, a), (sum_and_gate, expected)):
            h, gate = function(leaf, b)
            if changes:
                h += 1
            (h + gate).sum().backward()
        assert graph.parity is not None
        assert graph.parity.needed == (-1,)
        assert torch.allclose(a.grad, expected.grad)  # type: ignore[arg-type]
        expected.grad = None
    assert ("is changed before the backward" in str(graph.error)) is changes


def test_no_backward_is_not_waited_for_for_ever() -> None:
    run, ran = at_work((0,))
    for _ in range(2 * RUNS_WATCHED):
        run(torch.ones(3), torch.ones(3, requires_grad=True))
    assert 0 < len(ran) < 2 * RUNS_WATCHED


@pytest.mark.parametrize(
    ("needed", "parity"), [((-1,), {}), ((0,), {"changed": (0,)}), ((), {"several": True})], ids=str
)
def test_but_where_copies_are_no_answer_it_is(needed: tuple[int, ...], parity: dict[str, Any]) -> None:
    run, ran = at_work(needed, **parity)
    w = torch.ones(3, requires_grad=True)
    for _ in range(2 * RUNS_WATCHED):
        (loss,) = run(torch.ones(3), w)
    assert not ran
    loss.backward()
    run(torch.ones(3), w)
    assert ran == ["compiled"]


def test_many_runs_before_one_backward_are_all_waited_for() -> None:
    """A temperature in each of many equal blocks, which is held in its range before the backward."""
    given: list[Tensor] = []
    run, ran = at_work((0,), given.append)
    scales = [nn.Parameter(torch.ones(3)) for _ in range(2 * RUNS_WATCHED)]
    w = torch.ones(3, requires_grad=True)
    losses = [run(scale, w)[0] for scale in scales]
    assert not ran
    scales[-1].data.mul_(5)
    torch.stack(losses).sum().backward()
    run(scales[0], w)
    assert given[0] is not scales[0], "the code has a copy"


def test_runs_that_are_looked_at_later_count_too() -> None:
    """The backward comes to the last run of a step first."""
    run, ran = at_work((0,))
    w, early = torch.ones(3, requires_grad=True), torch.ones(3)
    (first,) = run(early, w)
    (last,) = run(torch.ones(3), w)
    early.data.mul_(5)
    last.backward()
    first.backward()
    x = torch.full((3,), 2.0)
    (loss,) = run(x, w)
    x.data.mul_(7)  # the code has a copy
    w.grad = None
    loss.backward()
    assert ran == ["compiled"]
    assert w.grad is not None
    assert w.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [nn.Buffer, nn.Parameter])
def test_of_what_no_backward_tells_only_buffers_are_copied(kind: Any) -> None:
    """Twelve equal blocks run one graph twelve times before a backward."""
    given: list[Tensor] = []
    run, _ = at_work((0,), given.append)
    lasting, w = kind(torch.ones(3)), torch.ones(3, requires_grad=True)
    for _ in range(RUNS_WATCHED + 5):
        run(lasting, w)
    assert given
    assert all((x is lasting) is (kind is nn.Parameter) for x in given)


def test_without_a_backward_nobody_waits() -> None:
    assert not watch_until_backward({0: torch.ones(3)}, [torch.ones(3), 5], lambda _: pytest.fail("called"))


@pytest.mark.parametrize("kind", [nn.Buffer, nn.Parameter])
def test_what_stays_as_it_is_is_copied_only_if_it_is_a_buffer(kind: Any) -> None:
    given: list[Tensor] = []
    run, _ = at_work((0,), given.append)
    lasting, w = kind(torch.ones(3)), torch.ones(3, requires_grad=True)
    run(lasting, w)[0].backward()
    run(lasting, w)
    assert (given[0] is lasting) is (kind is nn.Parameter)


def test_copies_are_for_the_run_alone() -> None:
    x, y = torch.ones(3), torch.ones(3)
    found = with_copies(lambda *args: args, frozenset({1}))(x, y, 7)
    assert found[0] is x
    assert found[1] is not y
    assert torch.equal(found[1], y)
    assert found[2] == 7


def test_what_lies_otherwise_or_is_given_back_is_not_copied() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert can_be_copied(x, [x + 1, None])
    assert can_be_copied(x.t(), [])
    assert not can_be_copied(x[:, :2], [])
    assert not can_be_copied(x[:1].expand(3, 4), [])
    assert not can_be_copied(x, [x[0]])
