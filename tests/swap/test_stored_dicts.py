"""Dicts that a step changes after a graph break, and puts into an attribute."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed

CALLS = 3


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.kept: Any = None


def the_same(h: Holder, x: Tensor) -> Tensor:
    found = h.held
    torch._dynamo.graph_break()
    found["z"] = 4.0
    h.kept = found
    return x.sin() * len(found)


def a_new_one(h: Holder, x: Tensor) -> Tensor:
    found = OrderedDict(h.held)
    torch._dynamo.graph_break()
    found["z"] = 4.0
    h.kept = found
    return x.sin() * len(found)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def by_python(held: Any) -> Any:
    return copy.deepcopy(held)


def one_of_pythons(h: Holder, x: Tensor) -> Tensor:
    found = by_python(h.held)
    found["z"] = x.sum()
    h.kept = [found, found]
    return x.sin() * len(found)


@pytest.mark.parametrize("function", [the_same, a_new_one, one_of_pythons])
@pytest.mark.parametrize("make", [dict, OrderedDict, lambda **items: defaultdict(float, **items)])
def test_it_is_kept_with_all_that_it_holds(
    make: Callable[..., Any], function: Callable[[Holder, Tensor], Tensor]
) -> None:
    compiled = CompiledFunction(function, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    ours, eager, x = Holder(make(a=1.0)), Holder(make(a=1.0)), torch.ones(2)
    with compiling_allowed(suppress_errors=True):
        for _ in range(CALLS):
            assert torch.equal(compiled.compile(ours, x), function(eager, x))
            assert ours.kept == eager.kept
            assert ours.held == eager.held
            assert (ours.kept is ours.held) is (eager.kept is eager.held)
