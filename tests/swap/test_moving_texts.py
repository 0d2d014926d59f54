"""Texts that come over a graph break: the code after it is compiled a few times, not once for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_same, hot
from tests.models import Small, fit, seeded

CALLS = 16
AT_MOST = 5
"""Four constants, and then a text that nobody knows."""


class Names:
    """Gives names, each a few times."""

    def __init__(self, times: int) -> None:
        self.times, self.given = times, 0
        self.kept: Any = None
        self.by_name = {f"n{n}": float(n) for n in range(CALLS + 1)}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next(self) -> str:
        self.given += 1
        return f"n{self.given // self.times}"


def keeps_it(names: Names, x: Tensor) -> Tensor:
    names.kept = names.next()
    return x.sin()


def writes_it(names: Names, x: Tensor) -> Tensor:
    name = names.next()
    names.kept = "a" + name + f"{name}/{name!r:>6}" + "%s" % name, [name], {"name": name}  # noqa: UP031
    return x.sin()


def asks_what_it_is(names: Names, x: Tensor) -> Tensor:
    name = names.next()
    if name == "n3":
        x = x.cos()
    names.kept = name in ("n2", "n4"), "n" in name, isinstance(name, str), name or "none", name is None
    return x.sin()


def looks_it_up(names: Names, x: Tensor) -> Tensor:
    return x.sin() * names.by_name[names.next()]


def uses_it_after_another_break(names: Names, x: Tensor) -> Tensor:
    name = names.next()
    x = x.sin()
    torch._dynamo.graph_break()
    names.kept = f"{name}."
    return x * 2


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    ("function", "pieces"),
    [(keeps_it, 1), (writes_it, 1), (asks_what_it_is, 2), (looks_it_up, 2), (uses_it_after_another_break, 2)],
)
def test_it_is_as_in_eager_and_compiled_a_few_times(
    function: Callable[[Names, Tensor], Tensor], pieces: int, times: int
) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    plain, ours = Names(times), Names(times)
    with compiling_allowed(suppress_errors=False):
        for _ in range(CALLS):
            x = torch.ones(3)
            torch.testing.assert_close(compiled.compile(ours, x), function(plain, x))
            assert vars(ours) == vars(plain)
    assert 1 <= backend.graphs <= AT_MOST * pieces


class Sometimes(Names):
    """A name may be empty."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next(self) -> str:
        self.given += 1
        return "" if self.given > AT_MOST and self.given % 3 == 0 else f"n{self.given}"


def if_there_is_one(names: Names, x: Tensor) -> Tensor:
    if names.next():
        x = x.cos()
    return x.sin()


def if_there_is_none(names: Names, x: Tensor) -> Tensor:
    name = names.next()
    return x.sin() if not name else x.cos()


@pytest.mark.parametrize("function", [if_there_is_one, if_there_is_none])
def test_one_that_may_be_empty_is_not_taken_to_be_there(function: Callable[[Names, Tensor], Tensor]) -> None:
    compiled = CompiledFunction(function, Counting(), dynamic=None, fullgraph=False)
    plain, ours = Sometimes(1), Sometimes(1)
    with compiling_allowed(suppress_errors=True):
        for _ in range(CALLS):
            x = torch.ones(3)
            torch.testing.assert_close(compiled.compile(ours, x), function(plain, x))


class KeepsAPath(Small):
    """Dynamo does not trace through the function of ``os.path``."""

    path = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.path = os.path.join("folder", f"{self.global_step:06}.pt")
        return super().training_step(batch, batch_idx)


def test_a_step_that_makes_a_path_stays_compiled() -> None:
    plain, model, backend = seeded(KeepsAPath), seeded(KeepsAPath), Counting()
    fit(plain)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback])
    assert callback.phase == "steady", callback.report.to_text()
    assert model.path == plain.path
    assert_same(plain, model)
    assert backend.graphs <= AT_MOST
