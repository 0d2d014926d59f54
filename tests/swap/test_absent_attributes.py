"""Attributes that are not there: compiled code finds one that is set later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import Counting


class Plain:
    """Has none."""


class Gives:
    """Has another one in its place."""

    def __getattr__(self, name: str) -> Any:
        if name == "gain":
            return 0.5
        raise AttributeError(name)


class Refuses:
    """Says so in its own words."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no {name}")


class GivesAsAModule(nn.Module):
    """Looks in what it is around, as an adapter does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(1, 1)
        self.inside.gain = 0.5  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)


class GivesAsADict(dict[str, float]):
    """Gives what it holds, as Lightning's hyperparameters do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class PlainDict(dict[str, float]):
    """Has items only."""


class PlainOrdered(OrderedDict[str, float]):
    """Has items only, as what a model of ``transformers`` returns."""


DICTS = [GivesAsADict, PlainDict, PlainOrdered]


def made(kind: Callable[..., Any]) -> Any:
    """A dict with an item: of one that holds nothing Dynamo guards only that."""
    return kind(item=1.0) if kind in DICTS else kind()


def tried(holder: Any, x: Tensor) -> Tensor:
    try:
        return x * holder.gain
    except AttributeError:
        return x.sin()


@pytest.mark.parametrize("kind", [Plain, Gives, Refuses, GivesAsAModule, *DICTS])
def test_one_that_is_set_later_is_found(kind: Callable[..., Any]) -> None:
    backend = Counting()
    compiled = CompiledFunction(tried, backend, dynamic=None, fullgraph=False)
    plain, ours = made(kind), made(kind)
    with compiling_allowed(suppress_errors=True):
        for k in range(8):
            for holder in (plain, ours):
                if k == 4:
                    holder.gain = 3.0
                if k == 6:
                    del holder.gain
            x = torch.ones(3) * k
            assert torch.equal(compiled.compile(ours, x), tried(plain, x))
    assert backend.graphs == 2
    assert backend.runs == 8


def test_one_that_a_class_of_dicts_is_given_later_is_found() -> None:
    class Kind(GivesAsADict):
        pass

    backend = Counting()
    compiled = CompiledFunction(tried, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=True):
        for k in range(4):
            if k == 2:
                Kind.gain = 3.0
            holder, x = Kind(item=1.0), torch.ones(3) * k
            assert torch.equal(compiled.compile(holder, x), tried(holder, x))
    assert backend.runs == 4
