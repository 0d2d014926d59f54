"""Transformers of torch that are given a mask: they ask whether it is the causal one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

WIDTH = 8


class Layers(nn.Module):
    """An encoder and a decoder, and a mask that is there before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.encoder, self.decoder = self.both.encoder, self.both.decoder
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(9))


def of_torch(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


def by_hand(n: int) -> Tensor:
    mask = (torch.triu(torch.ones(n, n)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def of_bools(n: int) -> Tensor:
    return torch.triu(torch.ones(n, n), diagonal=1).bool()


def of_a_band(n: int) -> Tensor:
    rows = torch.arange(n)
    return (rows[:, None] - rows[None]).abs() > 1


MASKS = [of_torch, by_hand, of_bools, of_a_band]
Mask = Callable[[int], Tensor]


class Recording(Counting):
    """It keeps which of torch's functions a graph calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.called += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return super().__call__(graph, inputs)

    @property
    def attentions(self) -> int:
        return sum("multi_head_attention_forward" in name for name in self.called)


def compare(function: Callable[..., Tensor], backend: Counting, sizes: tuple[int, ...]) -> None:
    layers = seeded(Layers)
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for n in sizes:
            x = torch.rand(2, n, WIDTH, generator=torch.Generator().manual_seed(n))
            torch.manual_seed(3)
            expected = function(layers, x)
            torch.manual_seed(3)
            assert torch.equal(compiled.compile(layers, x), expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used", ["encoder", "decoder", "both"])
def test_whether_a_mask_made_in_the_step_is_causal_is_known(mask: Mask, used: str) -> None:
    backend = Recording()

    def function(layers: Layers, x: Tensor) -> Tensor:
        made = mask(x.shape[1])
        if used == "encoder":
            return layers.encoder(x.sin(), mask=made).cos()
        if used == "decoder":
            return layers.decoder(x.sin(), x, tgt_mask=made).cos()
        return layers.both(x.sin(), x, tgt_mask=made).cos()

    compare(function, backend, (5, 5, 5))
    assert (backend.graphs, backend.runs) == (1, 3)


@pytest.mark.parametrize("used", ["encoder", "both"])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (5, 6, 7)])
def test_one_that_comes_from_outside_leaves_the_layers_compiled(used: str, sizes: tuple[int, ...]) -> None:
    backend = Recording()

    def function(layers: Layers, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = layers.mask[:n, :n]
        if used == "encoder":
            return layers.encoder(x.sin(), mask=mask).cos()
        return layers.both(x.sin(), x, tgt_mask=mask).cos()

    compare(function, backend, sizes)
    assert backend.attentions == {"encoder": 1, "both": 3}[used] * len(dict.fromkeys(sizes[:2]))


def test_a_mask_that_the_step_writes_to_is_asked_in_the_step() -> None:
    def function(layers: Layers, x: Tensor) -> Tensor:
        mask = torch.zeros(5, 5)
        mask[0, 1] = x.sum() * 0
        mask.masked_fill_(of_torch(5) < 0, float("-inf"))
        return layers.encoder(x, mask=mask)

    compare(function, Counting(), (5, 5, 5))


@pytest.mark.parametrize("n", [3, 4])
def test_a_number_that_is_computed_of_constants_is_known(n: int) -> None:
    backend = Counting()

    def function(layers: Layers, x: Tensor) -> Tensor:
        steps = torch.arange(n)
        if bool((steps > 2).any()):
            return x * 2 + steps.max().item()
        return x

    compare(function, backend, (5, 5))
    assert backend.graphs == 1


def test_numbers_that_are_drawn_are_not() -> None:
    def function(layers: Layers, x: Tensor) -> Tensor:
        drawn = torch.full((3,), 0.5).bernoulli()
        return x * (drawn > 0).all().item() + torch.rand(4).max().item() + torch.randint(9, (3,)).max().item()

    layers, x = seeded(Layers), torch.rand(2)
    compiled = CompiledFunction(function, Counting(), dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed in range(5):
            torch.manual_seed(seed)
            expected = function(layers, x)
            torch.manual_seed(seed)
            assert torch.equal(compiled.compile(layers, x), expected)


def test_what_the_user_compiles_is_as_ever() -> None:
    backend = Recording()
    layers, x = seeded(Layers), torch.rand(2, 5, WIDTH)
    compiled = torch.compile(lambda m, x: m.encoder(x, mask=of_torch(5)).cos(), backend=backend)
    with compiling_allowed(suppress_errors=False):
        compiled(layers, x)
    assert backend.attentions == 0


def with_two_kinds_of_masks(layers: Layers, x: Tensor) -> Tensor:
    return layers.encoder(x.sin(), mask=of_torch(x.shape[1]), src_key_padding_mask=x[..., 0] > 2).cos()


@pytest.mark.parametrize("action", ["default", "ignore", "once", "always"])
def test_a_warning_of_torchs_that_is_given_once_ends_no_graph(action: Any) -> None:
    backends = [Counting(), Counting()]
    found: list[set[str]] = []
    for backend in backends:
        vars(nn.functional).pop("__warningregistry__", None)
        warnings.onceregistry.clear()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter(action)
            if backend is backends[0]:
                for _ in range(6):
                    with_two_kinds_of_masks(seeded(Layers), torch.rand(2, 5, WIDTH))
            else:
                compare(with_two_kinds_of_masks, backend, (5, 5, 5))
        found.append({f"{each.filename}:{each.lineno} {each.message}" for each in given})
    assert any("mismatched" in text for text in found[0]) == (action != "ignore")
    assert found[1] == found[0]
    assert (backends[1].graphs == 1) == (action != "always")


class Translator(Small):
    """A step as tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(4, 2, 1, 1, 8, dropout=0.1, batch_first=True)
        self.last = nn.Linear(4, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].unflatten(-1, (-1, 4))
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        out = self.layers(x.sin(), x, tgt_mask=mask, tgt_is_causal=None)
        loss = nn.functional.cross_entropy(self.last(out.mean(1)), batch[1])
        self.log("loss", loss)
        return loss


def test_a_step_with_one_is_one_graph() -> None:
    plain, model, backend = seeded(Translator), seeded(Translator), Recording()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    assert (callback.report.graph_breaks, callback.report.recompiles) == (0, 0)
    assert backend.attentions == 3
