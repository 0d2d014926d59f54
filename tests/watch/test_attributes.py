"""Objects in a batch: what they hold is described, as far as it is a batch's."""

from __future__ import annotations

import enum
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.watch.attributes import attributes_of
from lightning_hotcompile.watch.family import Families, is_family
from lightning_hotcompile.watch.structure import describe, shapes_in, tensors_in


class Graph:
    """Nodes and edges, as libraries for graphs have them: in a store that knows its owner."""

    def __init__(self, n: int, **more: Any) -> None:
        self.store = {"x": torch.zeros(n, 8), "edges": torch.zeros(2, 3 * n, dtype=torch.long)}
        self.owner = weakref.ref(self)
        self._cached = n
        vars(self).update(more)


class Slots:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = torch.zeros(2)


class Kind(enum.Enum):
    ONE = 1


def holds_itself() -> Any:
    batch = Graph(3)
    batch.store["all"] = batch  # type: ignore[assignment]
    return batch


def of_a_gone_owner() -> Any:
    return Graph(3, parent=weakref.proxy(Graph(4)))


def test_sizes_of_what_it_holds_count() -> None:
    assert describe(Graph(3), []) == describe(Graph(3), [])
    assert describe(Graph(3), []) != describe(Graph(4), [])
    assert dict(shapes_in(describe([Graph(3)], []))) == {
        "batch.0.store.x": (3, 8),
        "batch.0.store.edges": (2, 9),
    }


def test_tensors_are_found_in_the_same_order() -> None:
    batch = {"a": Graph(5, y=[torch.zeros(7)]), "b": SimpleNamespace(z=torch.zeros(1, 2))}
    shapes = [shape for _, shape in shapes_in(describe(batch, []))]
    assert shapes == [t.shape for t in tensors_in(batch)] == [(5, 8), (2, 15), (7,), (1, 2)]


def test_graphs_of_many_sizes_are_a_family() -> None:
    families = Families()
    described = [families.described(describe(Graph(n), [])) for n in (4, 5, 6, 7, 11)]
    assert is_family(described[-1])
    assert described[-1] == described[-2]


def test_public_values_count_and_private_ones_do_not() -> None:
    values: list[Any] = []
    describe(Graph(3, task="nodes", classes=4), values)
    assert values == ["nodes", 4]


@pytest.mark.parametrize(
    "make",
    [
        holds_itself,
        lambda: Graph(3, dataset=[(torch.zeros(2), i) for i in range(200)]),
        lambda: Graph(3, dataset=dict.fromkeys(range(1000), 0)),
        lambda: Graph(3, samples=list(range(20_000))),
        lambda: SimpleNamespace(a=1, b="text"),
        lambda: Slots(),
        lambda: Kind.ONE,
        lambda: nn.Linear(2, 2),
        lambda: torch.Generator(),
        lambda: weakref.proxy(ALIVE),
        lambda: len,
    ],
)
def test_anything_else_counts_by_its_type(make: Any) -> None:
    batch = make()
    assert attributes_of(batch) == {}
    assert list(tensors_in(batch)) == []
    assert isinstance(describe(batch, []), str)


ALIVE = Graph(2)


def test_a_reference_to_what_is_gone_is_left_out() -> None:
    batch = of_a_gone_owner()
    assert "parent" not in attributes_of(batch)
    assert dict(shapes_in(describe(batch, []))).keys() == {"batch.store.x", "batch.store.edges"}


def test_no_code_of_its_class_runs() -> None:
    class Loud:
        def __init__(self) -> None:
            self.x = torch.zeros(2)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def y(self) -> Tensor:
            raise AssertionError

    assert list(attributes_of(Loud())) == ["x"]


@pytest.mark.parametrize("value", [1, 0.5, True, "text", None])
def test_long_lists_of_plain_values_are_one_part(value: Any) -> None:
    assert list(attributes_of(Graph(3, ids=[value] * 5000))) == ["store", "owner", "ids"]
