"""Iterators that come into compiled code: what they gave is what is kept, and they end where eager's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import Counting


class Kept:
    """What the functions write down."""

    def __init__(self) -> None:
        self.first: Any = None
        self.rest: Any = None
        self.collected: list[Any] = []
        self.batches = iter(tuple(torch.full((2,), float(n)) for n in range(8)))


def keeps_the_next(kept: Kept, items: Iterator[Any], x: Tensor) -> Tensor:
    kept.first = [next(items)]
    return x.sin()


def keeps_two(kept: Kept, items: Iterator[Any], x: Tensor) -> Tensor:
    kept.first = {"a": next(items)}
    kept.rest = [next(items), next(kept.batches)]
    return x.sin() * next(kept.batches)


def goes_through_all(kept: Kept, items: Iterator[Any], x: Tensor) -> Tensor:
    kept.first = next(items)
    for item in items:
        kept.collected.append(item)
    return x.sin()


def keeps_the_rest(kept: Kept, items: Iterator[Any], x: Tensor) -> Tensor:
    kept.first = next(items)
    kept.rest = list(items), next(items, "end")
    return x.sin()


def goes_on_after_another_break(kept: Kept, items: Iterator[Any], x: Tensor) -> Tensor:
    item = next(items)
    kept.first = item
    x = x.sin()
    torch._dynamo.graph_break()
    kept.rest = [x, item, next(items)]
    return x * 2


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
@pytest.mark.parametrize(
    "function",
    [keeps_the_next, keeps_two, goes_through_all, keeps_the_rest, goes_on_after_another_break],
)
def test_what_they_gave_is_as_in_eager(
    function: Callable[[Kept, Iterator[Any], Tensor], Tensor], kind: str
) -> None:
    def body(kept: Kept, x: Tensor) -> Tensor:
        items = iter((1, 2, 3) if kind == "numbers" else (x, x + 1, x + 2))
        torch._dynamo.graph_break()
        return function(kept, items, x)

    backend = Counting()
    compiled = CompiledFunction(body, backend, dynamic=None, fullgraph=False)
    plain, ours = Kept(), Kept()
    with compiling_allowed(suppress_errors=False):
        for _ in range(2):
            x = torch.ones(2)
            torch.testing.assert_close(compiled.compile(ours, x), body(plain, x))
            for name in ("first", "rest", "collected"):
                assert repr(getattr(ours, name)) == repr(getattr(plain, name))
    assert list(map(repr, ours.batches)) == list(map(repr, plain.batches))
    assert backend.runs
