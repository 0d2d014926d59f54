"""Dicts whose items are their attributes are compiled, and looked at in each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import Counting


class Gets(dict[str, Any]):
    """Gives ``None`` for what it has not."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class Indexes(dict[str, Any]):
    """Raises ``KeyError`` for what it has not."""

    __getattr__ = dict.__getitem__


class Ordered(OrderedDict[str, Any]):
    """As the first, in order."""

    __getattr__ = OrderedDict.get


class Fills(dict[str, Any]):
    """Makes what it has not, without keeping it."""

    __getattr__ = dict.__getitem__

    def __missing__(self, name: str) -> Any:
        return None


class Doubles(dict[str, Any]):
    """Its items are not its attributes."""

    __getattr__ = dict.__getitem__

    def __getitem__(self, name: str) -> Any:
        return 2 * super().__getitem__(name)


def looped(settings: Any, x: Tensor) -> Tensor:
    for _ in range(settings.layers):
        x = x.sin() * settings.gain
    return x


def with_one_that_may_be_absent(settings: Any, x: Tensor) -> Tensor:
    return x * settings.gain if settings.bias is None else x * settings.gain + settings.bias


def caught(settings: Any, x: Tensor) -> Tensor:
    try:
        return x * settings.bias
    except KeyError:
        return x.cos()


def written(settings: Any, x: Tensor) -> Tensor:
    settings.seen = x.sum()
    return x * settings.gain


CASES = [
    *[(looped, kind) for kind in (Gets, Indexes, Ordered, Fills)],
    *[(with_one_that_may_be_absent, kind) for kind in (Gets, Ordered, Fills)],
    (caught, Indexes),
]


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_what_reads_them_is_one_graph(function: Callable[..., Tensor], kind: type[dict[str, Any]]) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    plain, ours = kind(layers=3, gain=0.5), kind(layers=3, gain=0.5)
    with compiling_allowed(suppress_errors=True):
        for k in range(8):
            for settings in (plain, ours):
                if k == 2:
                    settings["gain"] = 2.0
                if k == 4:
                    settings["bias"] = 3.0
                if k == 6:
                    del settings["bias"]
            x = torch.ones(3) * k
            assert torch.equal(compiled.compile(ours, x), function(plain, x))
    assert backend.runs == 8
    assert ours == plain


def test_an_item_that_the_class_gives_otherwise_is_no_attribute() -> None:
    compiled = CompiledFunction(looped, Counting(), dynamic=None, fullgraph=False)
    settings, x = Doubles(layers=3, gain=0.5), torch.ones(3)
    with compiling_allowed(suppress_errors=True):
        assert torch.equal(compiled.compile(settings, x), looped(settings, x))


def test_one_that_the_step_sets_is_an_item() -> None:
    compiled = CompiledFunction(written, Counting(), dynamic=None, fullgraph=False)
    plain, ours = Gets(gain=0.5), Gets(gain=0.5)
    with compiling_allowed(suppress_errors=True):
        for k in range(4):
            x = torch.ones(3) * k
            assert torch.equal(compiled.compile(ours, x), written(plain, x))
            assert torch.equal(ours["seen"], plain["seen"])
            assert not vars(ours)
