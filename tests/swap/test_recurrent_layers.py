"""Recurrent layers of torch between the parts of a step that are compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

KINDS = [nn.RNN, nn.LSTM, nn.GRU]
Kind = type[nn.RNN] | type[nn.LSTM] | type[nn.GRU]


class Parts(nn.Module):
    """A recurrent layer with others beside it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layer = kind(4, 4, batch_first=True)
        self.stack = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), kind(4, 4, batch_first=True))
        self.head = nn.Linear(4, 2)


def is_called(parts: Parts, x: Tensor) -> Tensor:
    out, _ = parts.layer(parts.embed(x).tanh())
    return parts.head(out).sum()


def is_in_a_stack(parts: Parts, x: Tensor) -> Tensor:
    out, _ = parts.stack(x.sin())
    return parts.head(out).sum()


def is_called_by_its_forward(parts: Parts, x: Tensor) -> Tensor:
    out, _ = parts.layer.forward(parts.embed(x).tanh())
    return parts.head(out).sum()


def has_its_weights_flattened(parts: Parts, x: Tensor) -> Tensor:
    z = parts.embed(x).tanh()
    parts.layer.flatten_parameters()
    out, _ = parts.layer(z)
    return parts.head(out).sum()


def has_its_weights_read(parts: Parts, x: Tensor) -> Tensor:
    first = x.new_zeros(parts.layer.num_layers, len(x), parts.layer.hidden_size)
    decay = sum(w.square().sum() for name, w in parts.layer.named_parameters() if "weight_hh" in name)
    out, _ = parts.layer(parts.embed(x), (first, first) if isinstance(parts.layer, nn.LSTM) else first)
    return parts.head(out).sum() + decay


def is_given_packed_sequences(parts: Parts, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(parts.embed(x).tanh(), [5, 3], batch_first=True)
    out, _ = pad_packed_sequence(parts.layer(packed)[0], batch_first=True)
    return parts.head(out).sum()


def is_called_without_gradients(parts: Parts, x: Tensor) -> Tensor:
    z = parts.embed(x)
    with torch.no_grad():
        out, _ = parts.layer(z)
    return (parts.head(out) * z.mean()).sum()


USES = [
    is_called,
    is_in_a_stack,
    is_called_by_its_forward,
    has_its_weights_flattened,
    has_its_weights_read,
    is_given_packed_sequences,
    is_called_without_gradients,
]


def gradients(function: Callable[[Parts, Tensor], Tensor], parts: Parts, x: Tensor) -> list[Tensor | None]:
    parts.zero_grad()
    function(parts, x).backward()
    return [p.grad for p in parts.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_what_is_around_one_is_compiled(use: Callable[[Parts, Tensor], Tensor], kind: Kind) -> None:
    backend, parts = Counting(), seeded(lambda: Parts(kind))
    compiled = CompiledFunction(use, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed in range(3):
            x = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(seed))
            expected = gradients(use, parts, x)
            assert any(found is not None for found in expected)
            for found, wanted in zip(gradients(compiled.compile, parts, x), expected, strict=True):
                assert (found is None) == (wanted is None)
                assert found is None or torch.equal(found, wanted)
    assert backend.graphs >= 2, "before and after it"


class Wrapped(nn.LSTM):
    """One with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out, _ = super().forward(x.tanh())
        return torch.relu(out) + x


@pytest.mark.parametrize("how", ["called", "by itself"])
def test_one_with_a_forward_of_its_own(how: str) -> None:
    backend, layer = Counting(), seeded(lambda: Wrapped(4, 4, batch_first=True))
    function = (lambda m, x: m(x.sin()).cos()) if how == "called" else Wrapped.forward
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed in range(3):
            x = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(compiled.compile(layer, x), function(layer, x))
    assert backend.graphs >= 2


def test_users_who_allow_dynamo_to_trace_them_have_one_graph() -> None:
    backend, parts = Counting(), seeded(lambda: Parts(nn.LSTM))
    compiled = CompiledFunction(is_called, backend, dynamic=None, fullgraph=False)
    with torch._dynamo.config.patch(allow_rnn=True), compiling_allowed(suppress_errors=False):
        compiled.compile(parts, torch.rand(2, 5, 3))
    assert backend.graphs == 1


class Tagger(Small):
    """Layers, a recurrent one, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 4, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out, (hidden, _) = self.recurrent(batch[0].sin().unflatten(-1, (-1, 2)))
        loss = nn.functional.cross_entropy(self.last(out.mean(1) + hidden[-1]), batch[1])
        self.log("loss", loss)
        return loss


def test_a_step_with_one_runs_compiled() -> None:
    plain, model, backend = seeded(Tagger), seeded(Tagger), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    assert (callback.report.graph_breaks, callback.report.recompiles) == (1, 0)
    assert backend.graphs == 2
