"""Numbers of numpy's in a compiled step: what Python does with them, and what the graph does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import TORCH, compiling_allowed


class Space:
    """What says of a number whether it is in it, as those of gymnasium do."""

    dtype = np.dtype(np.int64)

    def contains(self, n: int) -> bool:
        found = self.dtype.type(n)
        np.random.rand(1)  # Python's own, so the number goes on after a graph break
        return bool(found.dtype == self.dtype and 0 <= int(found) < 2)


ANSWERS: list[Callable[[int], Any]] = [
    lambda n: int(np.uint8(197 + n) + np.uint8(100)),
    lambda n: float(np.float32(0.1) * np.float32(n)),
    lambda n: float(np.sqrt(np.float32(n))),
    lambda n: np.int32(2**31 - 1) * np.int32(n),
    lambda n: np.int64(n) / np.int64(2),
    lambda n: np.int64(n) // 2 + np.int64(n) % 2,
    lambda n: -(np.float32(n) ** 2),
    lambda n: isinstance(np.int64(n), np.integer),
    lambda n: isinstance(np.int64(n), int),
    lambda n: isinstance(np.float64(n), float),
    lambda n: type(np.float32(n)).__name__,
    lambda n: hasattr(np.float32(n), "dtype"),
    lambda n: np.float32(n).dtype == np.float32,
    lambda n: np.float64(n).item(),
    lambda n: np.sqrt(n).astype(np.float32),
    lambda n: (1 / np.sqrt(n)).dtype,
    lambda n: repr(np.float64(n)),
    lambda n: str(np.float32(0.1) * n),
    lambda n: f"{np.float32(0.1) * n}",
    lambda n: format(np.float32(0.1) * n),
    lambda n: format(np.float32(0.1) * n, ".9f"),
    lambda n: math.sqrt(np.float32(n)),
    lambda n: [1, 2, 3, 4][np.int64(n)],
    lambda n: np.int64(n) in (1, 3),
    lambda n: {3: "three"}[np.int64(n)],
    lambda n: divmod(np.int64(n), 2),
    lambda n: max(np.float32(0.1), 0.1),
    lambda n: sum([np.float32(0.1), np.float32(0.2), n]),
    lambda n: np.sum([np.float32(0.1), np.float32(n)]),
    lambda n: "even" if not np.int64(n - 3) else "odd",
    lambda n: "large" if np.log2(n) > 1 and np.bool_(n) else "small",
    lambda n: list(range(np.int64(n))),
    lambda n: np.float32(0.1) == 0.1,
    lambda n: np.float32(0.1) < 0.1 < np.float64(n),
    lambda n: round(np.float32(0.123) * n, ndigits=1),
    lambda n: Space().contains(n),
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("breaks", [False, True], ids=["in one frame", "after a graph break"])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_python_does_with_it_what_it_does_without(answer: Callable[[int], Any], breaks: bool) -> None:
    def step(x: Tensor, n: int) -> tuple[Tensor, Any]:
        y = x.sin()
        found = answer(n)
        if breaks:
            torch._dynamo.graph_break()
        return y + 1, found

    compiled = CompiledFunction(step, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    x = torch.ones(2)
    with compiling_allowed(suppress_errors=True):
        compiled.compile(x, 3)
    (got, found), (want, expected) = compiled.reuse(x, 3), step(x, 3)
    torch.testing.assert_close(got, want)
    assert (type(found), repr(found)) == (type(expected), repr(expected))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, n: x / np.sqrt(n),
        lambda x, n: np.sqrt(n) * x,
        lambda x, n: x * (1 / np.sqrt(n)),
        lambda x, n: x ** np.float64(2),
        lambda x, n: x.reshape(np.prod(x.shape), 1),
        lambda x, n: x.view(int(np.prod(x.shape))),
        lambda x, n: torch.clamp(x, max=np.float32(0.1)),
        lambda x, n: torch.full((2,), np.float32(0.1)) * x.sum(),
        lambda x, n: x[: np.int64(2)],
        lambda x, n: x * (2 if np.log2(n) > 1 and not np.int64(n - 3) else 3),
    ],
)
def test_with_tensors_it_is_a_number_of_the_graph(use: Callable[[Tensor, int], Tensor]) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.linspace(-1, 1, 8).view(2, 4)
    with compiling_allowed(suppress_errors=False):
        got = CompiledFunction(use, backend, dynamic=None, fullgraph=True).compile(x, 3)
    want = use(x, 3)
    torch.testing.assert_close(got, want)
    assert got.dtype == want.dtype
    assert len(graphs) == 1


class Kept:
    """What a module keeps from step to step."""

    def __init__(self) -> None:
        self.tau: Any = 1.0
        self.seen = 0
        self.weights = np.array([0.1, 0.2])
        self.labels = np.array([1, 0, 1])
        self.rate = np.float32(0.1)


def anneals(h: Kept, x: Tensor) -> Tensor:
    tau = h.tau
    h.tau *= np.exp(-0.5)
    return x / tau


def anneals_to_a_bound(h: Kept, x: Tensor) -> Tensor:
    loss = h.tau * x.square().mean()
    h.tau = max(h.tau * np.exp(-0.5), 0.5)
    return loss


def follows_a_cosine(h: Kept, x: Tensor) -> Tensor:
    h.seen += 1
    h.tau = 0.5 * (1 + np.cos(np.pi * h.seen / 100))
    return h.tau * x.square().mean()


def is_set_or_not(h: Kept, x: Tensor) -> Tensor:
    if h.tau is not None:
        x = x * h.tau
    h.tau = np.float64(0.5)
    return x


def makes_a_tensor(h: Kept, x: Tensor) -> Tensor:
    return x * torch.tensor([np.sqrt(2.0)]) + torch.as_tensor(np.int32(h.seen))


def weighs(h: Kept, x: Tensor) -> Tensor:
    return x.square().mean() * h.weights[0]


def counts_labels(h: Kept, x: Tensor) -> Tensor:
    return x * len(dict.fromkeys(np.unique(h.labels), 1))


def looks_a_label_up(h: Kept, x: Tensor) -> Tensor:
    return x * {1: 5.0}.get(h.labels[0], 7.0)


def asks_what_it_is(h: Kept, x: Tensor) -> Tensor:
    factor = 2 if isinstance(h.weights[0], float) else 3
    return x * factor * (5 if isinstance(h.rate, np.floating) else 7)


def decays(h: Kept, x: Tensor) -> Tensor:
    h.seen += 1
    h.tau = np.float32(0.99) ** h.seen
    return x * h.tau


def scales_by_a_product(h: Kept, x: Tensor) -> Tensor:
    h.tau = h.weights @ h.weights
    return x / h.tau


KEEPING = [
    anneals,
    anneals_to_a_bound,
    follows_a_cosine,
    is_set_or_not,
    makes_a_tensor,
    weighs,
    counts_labels,
    looks_a_label_up,
    asks_what_it_is,
    decays,
    scales_by_a_product,
]


@pytest.mark.parametrize("step", KEEPING)
def test_a_module_that_keeps_one_goes_on_as_without(step: Callable[[Kept, Tensor], Tensor]) -> None:
    compiled = CompiledFunction(step, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    ours, theirs, x = Kept(), Kept(), torch.ones(2)
    for n in range(8):
        if n < 4:
            with compiling_allowed(suppress_errors=True):
                got = compiled.compile(ours, x)
        else:  # some of it eagerly, as when compiled code is taken back
            got = compiled.reuse(ours, x) if n % 2 else step(ours, x)
        want = step(theirs, x)
        torch.testing.assert_close(got, want)
        assert got.dtype == want.dtype
        assert (type(ours.tau), repr(ours.tau)) == (type(theirs.tau), repr(theirs.tau))


@pytest.mark.skipif(TORCH < (2, 13), reason="to Dynamo each text that comes in is a constant")
def test_what_is_pythons_is_no_constant_for_being_looked_at() -> None:
    graphs: list[Any] = []
    compiled = CompiledFunction(
        lambda x, text: x * (2 if isinstance(text, str) else 3),
        lambda graph, _: graphs.append(graph) or graph.forward,
        dynamic=None,
        fullgraph=True,
    )
    with compiling_allowed(suppress_errors=False):
        for text in "abcde":
            assert compiled.compile(torch.ones(2), text).sum() == 4
    assert len(graphs) == 1


def test_a_scale_of_numpys_is_part_of_the_graph() -> None:
    graphs: list[Any] = []
    kept, x = Kept(), torch.ones(2)
    kept.tau = 1 / np.sqrt(np.float64(16))
    compiled = CompiledFunction(
        lambda h, x: (x * h.tau, x.bfloat16() / h.tau) if h.tau is not None else x,
        lambda graph, _: graphs.append(graph) or graph.forward,
        dynamic=None,
        fullgraph=True,
    )
    with compiling_allowed(suppress_errors=False):
        got = compiled.compile(kept, x)
    assert [each.dtype for each in got] == [torch.float32, torch.bfloat16]
    assert len(graphs) == 1


class Strided(torch.nn.Module):
    """A vocoder's first layer: how far it steps is a product of its rates, which numpy has made."""

    def __init__(self) -> None:
        super().__init__()
        step = np.prod([2, 2])
        self.down = torch.nn.Conv1d(1, 2, 2 * step, stride=step, padding=step // 2)
        self.pool = torch.nn.AvgPool1d((step,))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.down(x)).tanh()


def test_settings_of_a_layer_may_be_numpys() -> None:
    layer, x, graphs = Strided(), torch.randn(1, 1, 64), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(aot_eager(graph, inputs))
        return graphs[-1]

    compiled = CompiledFunction(layer.forward, backend, dynamic=None, fullgraph=True)
    with compiling_allowed(suppress_errors=False):
        torch.testing.assert_close(compiled.compile(x), layer(x))
        layer.down.stride = (np.int64(2),)
        torch.testing.assert_close(compiled.compile(x), layer(x))
        torch.testing.assert_close(compiled.compile(x), layer(x))
    assert len(graphs) == 2
