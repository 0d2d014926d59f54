"""Copies that a step makes of objects: what Python's ``copy`` gives, whatever the class says of itself."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed

CALLS = 4


class Plain:
    def __init__(self) -> None:
        self.values = [1.0, 2.0]
        self.same = self.values


class Reduced:
    def __init__(self, value: float = 1.0) -> None:
        self.values = [value]

    def __reduce__(self) -> Any:
        return Reduced, (self.values[0] + 1,)


class State:
    def __init__(self) -> None:
        self.values = [1.0]

    def __getstate__(self) -> dict[str, Any]:
        return {"values": [self.values[0] + 3]}


class Restored:
    def __init__(self) -> None:
        self.values = [1.0]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.values = [state["values"][0] + 5]


class Anew:
    def __new__(cls, value: float = 2.0) -> Anew:
        made = super().__new__(cls)
        made.at_first = value
        made.values = [value]
        return made

    at_first: float
    values: list[float]

    def __getnewargs__(self) -> tuple[float]:
        return (self.values[0] + 1,)


class Slots:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [1.0, 2.0]


class Itself:
    def __init__(self) -> None:
        self.values = [1.0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        made = Itself()
        made.values = [7.0]
        return made


class Listed(list[Any]):
    pass


class Pair(NamedTuple):
    values: list[float]
    name: str


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.kept: Any = None


def numbers_in(held: Any) -> list[Any]:
    """All that an object of this file holds."""
    if isinstance(held, dict):
        return [*held.values()]
    return list(held) if isinstance(held, list) else list(held.values)


def deep(h: Holder, x: Tensor) -> Tensor:
    made = copy.deepcopy(h.held)
    if isinstance(made, list):
        made.append(4.0)
    elif isinstance(made, dict):
        made["z"] = 4.0
    else:
        made.values.append(4.0)
    found = x.sin() * sum(numbers_in(made)) + sum(numbers_in(h.held))
    h.kept = made
    return found


def shallow(h: Holder, x: Tensor) -> Tensor:
    h.kept = copy.copy(h.held)
    return x.sin() * sum(numbers_in(h.kept)) + sum(numbers_in(h.held))


MAKE = [
    Plain,
    Reduced,
    State,
    Restored,
    Anew,
    Slots,
    Itself,
    lambda: Listed([1.0, 2.0]),
    lambda: Counter({"a": 2, "b": 1}),
    lambda: OrderedDict(a=1.0),
    lambda: defaultdict(float, a=1.0),
    lambda: Pair([1.0, 2.0], "a"),
]


@pytest.mark.parametrize("function", [deep, shallow])
@pytest.mark.parametrize("make", MAKE, ids=lambda make: type(make()).__name__)
def test_a_copy_is_the_one_that_python_makes(
    make: Callable[[], Any], function: Callable[[Holder, Tensor], Tensor]
) -> None:
    compiled = CompiledFunction(function, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    ours, eager, x = Holder(make()), Holder(make()), torch.ones(2)
    with compiling_allowed(suppress_errors=True):
        for _ in range(CALLS):
            assert torch.equal(compiled.compile(ours, x), function(eager, x))
            assert type(ours.kept) is type(eager.kept)
            assert numbers_in(ours.kept) == numbers_in(eager.kept)
            assert numbers_in(ours.held) == numbers_in(eager.held)
