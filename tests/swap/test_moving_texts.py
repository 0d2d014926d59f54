"""Texts that come over a graph break, or in a batch: what uses them is compiled a few times, not for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

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


Words = list[str]


def keeps_them(names: Names, words: Words, x: Tensor) -> Tensor:
    names.kept = words[0], [*words], {"last": words[-1]}
    return x.sin()


def writes_them(names: Names, words: Words, x: Tensor) -> Tensor:
    names.kept = f"{words[0]}-{words[1]!r}", "/".join(words), words[0] + "!"
    return x.sin()


def asks_what_they_are(names: Names, words: Words, x: Tensor) -> Tensor:
    if words[0] == "n3":
        x = x.cos()
    names.kept = words[1] in ("n5", "n6"), "n4" in words, words == ["n1", "n2"], words[0] < words[1]
    return x.sin()


def counts_their_letters(names: Names, words: Words, x: Tensor) -> Tensor:
    names.kept = [len(word) for word in words]
    return x.sin() * sum(ord(letter) for word in words for letter in word)


def looks_them_up(names: Names, words: Words, x: Tensor) -> Tensor:
    return x.sin() + torch.tensor([names.by_name[word] for word in words]).sum()


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    "function", [keeps_them, writes_them, asks_what_they_are, counts_their_letters, looks_them_up]
)
def test_those_in_a_list_are_as_in_eager_and_compiled_a_few_times(
    function: Callable[[Names, Words, Tensor], Tensor], times: int
) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    plain, ours = Names(1), Names(1)
    with compiling_allowed(suppress_errors=True):
        for n in range(CALLS - 1):
            x, words = torch.ones(3), [f"n{n // times}", f"n{n // times + 1}"]
            torch.testing.assert_close(compiled.compile(ours, words, x), function(plain, words, x))
            assert vars(ours) == vars(plain)
    assert backend.graphs <= AT_MOST * 2


class ReadsItsLabels(Small):
    """Its batches have words for labels, of which the step makes numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = {letter: n for n, letter in enumerate("abcdefgh")}

    def encode(self, words: list[str]) -> Tensor:
        return torch.tensor([[self.letters[letter] for letter in word] for word in words])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, words = batch
        y = self.encode(words).sum(1) % 3
        return super().training_step((x, y), batch_idx)


def batches_with_words() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(0, 8, (96, 4), generator=generator)
    words = ["".join("abcdefgh"[n] for n in row) for row in letters.tolist()]
    return DataLoader(list(zip(torch.randn(96, 8, generator=generator), words, strict=True)), batch_size=8)


def test_words_in_a_batch_leave_what_comes_after_them_compiled() -> None:
    """With a guard on each word the code that was compiled for one batch fitted no other."""
    plain, model, backend = seeded(ReadsItsLabels), seeded(ReadsItsLabels), Counting()
    fit(plain, train=batches_with_words(), max_epochs=4)
    callback = hot(**STEP, backend=backend)
    fit(model, [callback], train=batches_with_words(), max_epochs=4)
    assert callback.phase == "steady", callback.report.to_text()
    assert_same(plain, model)
    assert backend.graphs <= 2 * AT_MOST
    steady = next(phase for phase in callback.report.phases if phase.name == "steady")
    assert sum(region.runs for region in callback.report.regions) >= steady.steps
