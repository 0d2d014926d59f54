"""Modules of torch that hold more than one operation: recurrent ones, attention, transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.matrix.compare import Cell, check, in_scopes
from tests.matrix.nets import SgdNet


class Inner(SgdNet):
    """One module between ``inp`` and ``head``, on a sequence of three."""

    def __init__(
        self, make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        del self.blocks
        self.inner = make()
        self.call = call or (lambda module, x: module(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.inner, self.inp(x)))


def inner(
    make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor] | None = None
) -> Callable[[], Inner]:
    return lambda: Inner(make, call)


def sequence(x: Tensor) -> Tensor:
    return torch.stack([x, x * 0.5, x.sin()], 1)


def packed(module: Any, x: Tensor) -> Tensor:
    lengths = torch.tensor([3, 2, 1, 3, 2, 1, 3, 3])[: len(x)]
    out, _ = module(pack_padded_sequence(sequence(x), lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(out, batch_first=True)[0].mean(1)


def recurrent(kind: str, call: Callable[[Any, Tensor], Tensor] | None = None) -> Callable[[], Inner]:
    take = call or (lambda module, x: module(sequence(x))[0][:, -1])
    return inner(lambda: getattr(nn, kind)(8, 8, batch_first=True), take)


def attend(module: Any, x: Tensor) -> Tensor:
    return module(sequence(x), sequence(x), sequence(x), need_weights=False)[0].mean(1)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)


ALONE = None  # in scope "regions" the one small module is too small

CELLS = [
    Cell(name="LSTM", model=recurrent("LSTM"), regions=ALONE),
    Cell(name="GRU", model=recurrent("GRU"), regions=ALONE),
    Cell(name="RNN", model=recurrent("RNN"), regions=ALONE),
    Cell(name="LSTM packed", model=recurrent("LSTM", packed), regions=ALONE),
    Cell(
        name="attention",
        model=inner(lambda: nn.MultiheadAttention(8, 2, batch_first=True), attend),
        regions=ALONE,
    ),
    Cell(name="encoder", model=inner(encoder, lambda m, x: m(sequence(x)).mean(1))),
    Cell(name="decoder", model=inner(decoder, lambda m, x: m(sequence(x), sequence(x)).mean(1))),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)
