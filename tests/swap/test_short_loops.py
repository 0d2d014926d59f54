"""Loops over recurrent layers: of a few passes, each is compiled around its layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import TORCH, compiling_allowed
from lightning_hotcompile.swap.tracing.short_loops import MOST_PASSES
from tests.hot import STEP, Counting, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

LAYERS = 3


class Stack(nn.Module):
    """Recurrent layers with a norm after each."""

    def __init__(self, n: int = LAYERS) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.GRU(4, 4, batch_first=True) for _ in range(n))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(n))
        self.by_name = nn.ModuleDict({f"{i}": layer for i, layer in enumerate(self.layers)})


def one_by_one(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for layer in stack.layers:
        out, _ = layer(x)
        x = (x + out).tanh()
    return x.sin()


def with_their_norms(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for layer, norm in zip(stack.layers, stack.norms, strict=False):
        x = norm(x + layer(x)[0])
    return x.sin()


def with_their_numbers(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for i, layer in enumerate(stack.layers):
        x = stack.norms[i](x + layer(x)[0] * (i + 1))
        if i < LAYERS - 1:
            x = x.relu()
    return x.sin()


def by_numbers(stack: Stack, x: Tensor) -> Tensor:
    x, states = stack.first(x), []
    for i in range(len(stack.layers)):
        out, state = stack.layers[i](x)
        x = stack.norms[i](x + out)
        states.append(state)
    return x.sin() + torch.stack(states).sum()


def numbered_pairs(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for i, (layer, norm) in enumerate(zip(stack.layers, stack.norms, strict=False)):
        x = norm(x + layer(x)[0]) * (i + 1)
    return x.sin()


def by_name(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for name, layer in stack.by_name.items():
        x = x.sin() if name == "1" else x.cos()
        x = (x + layer(x)[0]).tanh()
    return x.sin()


def twice(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for times in (1, 2):
        for layer in stack.layers:
            x = (x + layer(x)[0]).tanh() * times
    return x.sin()


def until_one_is_enough(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for i, layer in enumerate(stack.layers):
        x = (x + layer(x)[0]).tanh()
        if i == 1:
            break
    else:
        x = x * 2
    return x.sin()


def in_a_list(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    found = [layer(x)[0].cos() for layer in stack.layers]
    return x.tanh() + torch.stack(found).sum(0)


NUMBERED = [with_their_numbers, numbered_pairs, until_one_is_enough]
LOOPS = [one_by_one, with_their_norms, with_their_numbers, by_numbers, numbered_pairs, by_name, twice]
LOOPS += [until_one_is_enough]
NUMBERED_ARE_LOST = TORCH < (2, 13)
"""Torch 2.11 cannot hand on an ``enumerate`` that has begun."""

Loop = Callable[[Stack, Tensor], Tensor]


def compare(loop: Loop, backend: Counting, stack: Stack, sizes: tuple[int, ...] = (5, 5, 5)) -> None:
    compiled = CompiledFunction(loop, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed, n in enumerate(sizes):
            x = torch.rand(2, n, 3, generator=torch.Generator().manual_seed(seed))
            found = []
            for function in (loop, compiled.compile):
                stack.zero_grad()
                out = function(stack, x)
                out.sum().backward()
                found.append((out, [p.grad for p in stack.parameters()]))
            assert torch.equal(found[0][0], found[1][0])
            for ours, theirs in zip(found[1][1], found[0][1], strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_around_the_layers_of_a_loop_is_compiled(loop: Loop) -> None:
    backend = Counting()
    compare(loop, backend, seeded(Stack))
    passes = {twice: 2 * LAYERS, until_one_is_enough: 2}.get(loop, LAYERS)
    assert backend.graphs == (0 if loop in NUMBERED and NUMBERED_ARE_LOST else 1 + passes)
    assert backend.runs == 3 * backend.graphs


@pytest.mark.parametrize("loop", [one_by_one, with_their_norms])
def test_for_any_size_as_well(loop: Loop) -> None:
    backend = Counting()
    compare(loop, backend, seeded(Stack), (5, 6, 7, 8))
    assert (backend.graphs, backend.runs) == (2 * (1 + LAYERS), 4 * (1 + LAYERS))


def test_a_list_of_what_layers_give_is_as_in_eager() -> None:
    backend = Counting()
    compare(in_a_list, backend, seeded(Stack))
    assert backend.graphs > 0


@pytest.mark.parametrize("n", [MOST_PASSES, MOST_PASSES + 1])
def test_a_long_loop_is_left_to_eager(n: int) -> None:
    backend = Counting()
    compare(one_by_one, backend, seeded(lambda: Stack(n)))
    assert backend.graphs == (n + 1 if n == MOST_PASSES else 0)


def test_a_loop_over_time_is_left_to_eager() -> None:
    def loop(stack: Stack, x: Tensor) -> Tensor:
        x, state, found = stack.first(x), None, []
        for t in range(x.shape[1]):
            out, state = stack.layers[0](x[:, t : t + 1], state)
            found.append(out.relu())
        return torch.cat(found, 1)

    backend = Counting()
    compare(loop, backend, seeded(Stack), (20, 20))
    assert backend.graphs == 0


def test_a_loop_that_counts_by_itself_is_as_in_eager() -> None:
    def loop(stack: Stack, x: Tensor) -> Tensor:
        x, i = stack.first(x), 0
        while i < LAYERS:
            x = (x + stack.layers[i](x)[0]).tanh()
            i += 1
        return x

    compare(loop, Counting(), seeded(Stack))


def pairs_of_one_iterator(stack: Stack, x: Tensor) -> Tensor:
    x, layers = stack.first(x), iter([*stack.layers, stack.layers[0]])
    for first, second in zip(layers, layers, strict=False):
        x = (x + first(x)[0]).tanh()
        x = (2 * x + second(x)[0]).tanh()
    return x.sin()


def an_iterator_with_a_rest(stack: Stack, x: Tensor) -> Tensor:
    x, scales = stack.first(x), iter([0.5, 1.5, 2.5, 3.5, 4.5])
    for layer, scale in zip(stack.layers, scales, strict=False):
        x = (x + layer(x)[0]).tanh() * scale
    return x.sin() * sum(scales)


def a_list_that_grows(stack: Stack, x: Tensor) -> Tensor:
    x, waiting = stack.first(x), [stack.layers[0]]
    for layer in waiting:
        x = (x + layer(x)[0]).tanh()
        if len(waiting) < LAYERS:
            waiting.append(stack.layers[len(waiting)])
    return x.sin() * len(waiting)


def numbered_of_a_list_that_grows(stack: Stack, x: Tensor) -> Tensor:
    x, scales = stack.first(x), [1.0]
    for i, scale in enumerate(scales):
        x = (x + stack.layers[i](x)[0]).tanh() * scale
        if len(scales) < LAYERS:
            scales.append(scale + 1)
    return x.sin()


def a_dict_whose_values_change(stack: Stack, x: Tensor) -> Tensor:
    x, scales = stack.first(x), {"0": 0.5, "1": 1.0, "2": 2.0}
    for name, scale in scales.items():
        x = (x + stack.by_name[name](x)[0]).tanh() * scale
        scales["2"] += 1
    return x.sin()


def a_generator_that_looks_at_the_loop(stack: Stack, x: Tensor) -> Tensor:
    x, scale = stack.first(x), 1
    for layer, times in ((layer, scale) for layer in stack.layers):
        x = (x + layer(x)[0]).tanh() * times
        scale += 1
    return x.sin()


def with_numbers_of_a_map(stack: Stack, x: Tensor) -> Tensor:
    x = stack.first(x)
    for layer, scale in zip(stack.layers, map(math.sqrt, range(1, 9)), strict=False):
        x = (x + layer(x)[0]).tanh() * scale
    return x.sin()


CHANGING = [pairs_of_one_iterator, an_iterator_with_a_rest, a_list_that_grows, numbered_of_a_list_that_grows]
CHANGING += [] if TORCH < (2, 13) else [a_dict_whose_values_change]  # torch 2.11 makes a list of it
CHANGING += [a_generator_that_looks_at_the_loop, with_numbers_of_a_map]


@pytest.mark.parametrize("loop", CHANGING)
def test_a_loop_through_what_changes_meanwhile_is_as_in_eager(loop: Loop) -> None:
    compare(loop, Counting(), seeded(Stack))


class Recurrent(Small):
    """A step with a stack of recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(LAYERS))
        self.last = nn.Linear(4, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].unflatten(-1, (-1, 4)).sin()
        for layer, norm in zip(self.layers, self.norms, strict=False):
            out, _ = layer(x)
            x = norm(x + nn.functional.dropout(out, 0.1, self.training))
        loss = nn.functional.cross_entropy(self.last(x.mean(1)), batch[1])
        self.log("loss", loss)
        return loss


def test_a_step_with_a_stack_runs_compiled() -> None:
    plain, model, backend = seeded(Recurrent), seeded(Recurrent), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    assert backend.graphs == 1 + LAYERS
