"""Texts of what the step changes after it has asked for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import Counting


class Named:
    """Counts how often it was written."""

    def __init__(self) -> None:
        self.written = 0

    def __str__(self) -> str:
        self.written += 1
        return f"named {self.written}"


class Notes:
    def __init__(self) -> None:
        self.found: Any = None
        self.named = Named()


def a_running_total(notes: Notes, x: Tensor) -> Tensor:
    total, texts = x.detach().sum(), []
    for name in ("a", "b"):
        texts.append(f"{name}: {total:.3f}")
        total += 1
    notes.found = texts
    return x.sin()


def a_list_that_grows(notes: Notes, x: Tensor) -> Tensor:
    total = x.detach().sum()
    totals = [total]
    text = "of {}".format(totals)  # noqa: UP032
    totals.append(total * 2)
    notes.found = text
    return x.sin()


def an_object(notes: Notes, x: Tensor) -> Tensor:
    text = f"{notes.named}"
    notes.named.written += 10
    notes.found = text, notes.named.written
    return x.sin()


def a_size(notes: Notes, x: Tensor) -> Tensor:
    notes.found = f"{x.shape} {tuple(x.shape)} {x.dtype}"
    return x.sin()


def compare(function: Callable[[Notes, Tensor], Tensor], backend: Counting) -> None:
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    plain, ours = Notes(), Notes()
    with compiling_allowed(suppress_errors=True):
        for rows in (4, 5, 6, 7, 6):
            x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(rows))
            assert torch.equal(compiled.compile(ours, x), function(plain, x))
            assert ours.found == plain.found
            assert vars(ours.named) == vars(plain.named)


@pytest.mark.parametrize("function", [a_running_total, a_list_that_grows, an_object, a_size])
def test_they_are_of_what_was_there(function: Callable[[Notes, Tensor], Tensor]) -> None:
    compare(function, Counting())


@pytest.mark.parametrize("function", [a_running_total, a_size])
def test_the_text_of_a_number_or_a_size_ends_no_graph(function: Callable[[Notes, Tensor], Tensor]) -> None:
    backend = Counting()
    compare(function, backend)
    assert (backend.graphs, backend.runs) == (2, 5)  # for one size, and for any
