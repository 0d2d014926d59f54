"""Which batches are one family, and what of them varies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.watch import family
from lightning_hotcompile.watch.family import Families, is_family
from lightning_hotcompile.watch.signature import SignatureReader
from lightning_hotcompile.watch.structure import FamilyShape, describe, shapes_in, tensors_in


def x(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def described(families: Families, *batches: Any) -> list[Any]:
    return [families.described(describe(batch, [])) for batch in batches]


def shapes(description: Any) -> list[tuple[Any, ...]]:
    return [tuple(shape) for _, shape in shapes_in(description)]


class TestWhatVaries:
    def test_a_dimension_of_four_sizes(self) -> None:
        found = described(Families(), *[x(8, n) for n in (5, 6, 7, 8, 9, 5)])
        assert [shapes(f) for f in found[:3]] == [[(8, 5)], [(8, 6)], [(8, 7)]]
        assert [shapes(f) for f in found[3:]] == [[(8, "n0")]] * 3
        assert len(set(found[3:])) == 1

    def test_equal_sizes_share_a_symbol(self) -> None:
        batches = [{"ids": x(8, n), "mask": x(8, n), "spans": [x(n), x(3, 2)]} for n in (5, 6, 7, 9)]
        found = described(Families(), *batches)
        assert shapes(found[-1]) == [(8, "n0"), (8, "n0"), ("n0",), (3, 2)]

    def test_sizes_that_move_apart_have_symbols_of_their_own(self) -> None:
        found = described(Families(), *[(x(8, n), x(8, n - 1), x(8, 20 - n)) for n in (5, 6, 7, 9)])
        assert shapes(found[-1]) == [(8, "n0"), (8, "n1"), (8, "n2")]

    def test_a_coincidence_is_no_tie(self) -> None:
        found = described(Families(), *[(x(5, n), x(n, 5)) for n in (5, 6, 7, 9)])
        assert shapes(found[-1]) == [(5, "n0"), ("n0", 5)]

    def test_those_that_part_later_get_two(self) -> None:
        families = Families()
        together = described(families, *[(x(n), x(n)) for n in (5, 6, 7, 9)])[-1]
        apart = described(families, (x(5), x(7)))[-1]
        assert shapes(together) == [("n0",), ("n0",)]
        assert shapes(apart) == [("n0",), ("n1",)]

    def test_the_short_last_batch_makes_no_family(self) -> None:
        families = Families()
        found = [f for _ in range(50) for f in described(families, *[x(8, 4)] * 5, x(3, 4))]
        assert not any(is_family(f) for f in found)

    def test_the_short_last_batch_of_a_family_is_another_signature(self) -> None:
        found = described(Families(), *[x(8, n) for n in (5, 6, 7, 9)], x(3, 6), x(8, 6))
        assert shapes(found[-2]) == [(3, "n0")]
        assert shapes(found[-1]) == [(8, "n0")]

    @pytest.mark.parametrize("odd", [0, 1])
    def test_sizes_that_compilers_treat_apart_are_no_members(self, odd: int) -> None:
        found = described(Families(), *[x(8, n) for n in (odd, 5, 6, 7, 9)], x(8, odd), x(8, 5))
        assert shapes(found[3]) == [(8, 7)]  # the odd one does not count as a size
        assert shapes(found[-2]) == [(8, odd)]
        assert shapes(found[-1]) == [(8, "n0")]

    def test_sizes_that_stay_for_long_make_no_family(self) -> None:
        families = Families()
        for n in (5, 6, 7, 8, 9, 10):
            found = described(families, *[x(8, n)] * (family.MET_WITHIN // 3 + 2))
            assert not is_family(found[-1])

    def test_what_varies_stays_so(self) -> None:
        families = Families()
        described(families, *[x(8, n) for n in (5, 6, 7, 9)])
        described(families, *[x(8, 5)] * (2 * family.MET_WITHIN))
        assert is_family(described(families, x(8, 11))[0])

    @pytest.mark.parametrize(
        "other",
        [
            lambda n: torch.zeros(8, n, dtype=torch.int64),
            lambda n: x(8, n, 1),
            lambda n: [x(8, n)],
            lambda n: x(8, n).requires_grad_(),
            lambda n: x(n, 8).t(),
        ],
    )
    def test_other_kinds_are_other_families(self, other: Callable[[int], Any]) -> None:
        families = Families()
        described(families, *[x(8, n) for n in (5, 6, 7, 9)])
        assert not is_family(described(families, other(6))[0])

    @pytest.mark.parametrize(
        "make",
        [
            lambda n: torch.zeros(2, 3, n, 6).to(memory_format=torch.channels_last),
            lambda n: x(n, 8).t(),
            lambda n: x(8, 64)[:, :n],
        ],
        ids=["channels_last", "transposed", "slices"],
    )
    def test_strides_may_vary_with_the_size(self, make: Callable[[int], Tensor]) -> None:
        found = described(Families(), *[make(n) for n in (5, 6, 7, 9, 11)])
        assert len(set(found[3:])) == 1
        assert is_family(found[-1])

    @pytest.mark.parametrize("make", [lambda n: x(n, n).to_sparse(), lambda n: [x(2)] * n, lambda n: "a" * n])
    def test_what_has_no_sizes_of_its_own_makes_none(self, make: Callable[[int], Any]) -> None:
        assert not any(is_family(f) for f in described(Families(), *[make(n) for n in range(2, 12)]))

    def test_a_class_that_is_called_tensor_is_none(self) -> None:
        class Tensor(tuple[Any, ...]):
            __slots__ = ()

        odd = [Tensor(([1], n, 1, 1, (1,))) for n in range(4)]
        assert not any(is_family(f) for f in described(Families(), *odd))

    def test_a_family_outlives_many_other_kinds(self) -> None:
        families = Families()
        described(families, *[x(8, n) for n in (5, 6, 7, 9)])
        described(families, *[[x(2)] * n for n in range(200)])
        assert is_family(described(families, x(8, 12))[0])

    def test_more_sizes_than_are_kept_ready(self) -> None:
        families = Families()
        found = described(families, *[x(8, n) for n in range(2, 1500)], x(8, 5))
        assert len(set(found[3:])) == 1


class TestSettings:
    def test_none_for_dynamic_false(self) -> None:
        found = described(Families.for_setting(False), *[x(8, n) for n in range(2, 30)])
        assert not any(map(is_family, found))

    def test_two_sizes_for_dynamic_true(self) -> None:
        found = described(Families.for_setting(True), x(8, 5), x(8, 6))
        assert [is_family(f) for f in found] == [False, True]

    @pytest.mark.parametrize("dynamic", ["auto", None])
    def test_four_otherwise(self, dynamic: Any) -> None:
        found = described(Families.for_setting(dynamic), *[x(8, n) for n in (5, 6, 7, 9)])
        assert [is_family(f) for f in found] == [False, False, False, True]


class TestWords:
    def test_places_and_sizes(self) -> None:
        families = Families()
        batches = [{"ids": x(8, n), "y": (x(n), x(8, 30 - n))} for n in (5, 6, 7, 9)]
        last = described(families, *batches)[-1]
        assert families.text(last) == (
            "n0 = dimension 1 of batch.ids, dimension 0 of batch.y.0: 5 to 9; "
            "n1 = dimension 1 of batch.y.1: 21 to 25"
        )

    def test_nothing_for_other_batches(self) -> None:
        families = Families()
        assert families.text(described(families, x(2))[0]) == ""
        assert families.text(("Tensor", FamilyShape(("n0",)), 1, 2, 3, "contiguous")) == ""


class TestSignature:
    def test_a_family_has_one_signature(self) -> None:
        reader = SignatureReader(nn.Linear(2, 2))
        signatures = [reader.read((x(8, n), x(8, n))) for n in (5, 6, 7, 9, 5, 12)]
        assert len(set(signatures[3:])) == 1
        assert len({s.digest for s in signatures[3:]}) == 1
        assert reader.read((x(8, 10), x(8, 10))) == signatures[-1]
        assert reader.read((x(7, 10), x(7, 10))) != signatures[-1]
        assert reader.read((x(8, 1), x(8, 1))) != signatures[-1]

    def test_a_length_that_comes_along_is_dropped_too(self) -> None:
        reader = SignatureReader(nn.Linear(2, 2))
        signatures = [reader.read((x(8, n), n)) for n in range(5, 20)]
        assert len(set(signatures[7:])) == 1
        assert signatures[-1].values == ()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_and_shapes_are_in_the_same_order() -> None:
    batch = {
        "a": [x(2), (x(3, 4), None, "s", 5)],
        "b": {"c": x(4).to_sparse(), "d": x(5)},
        "e": torch.nested.nested_tensor([x(2), x(3)], layout=torch.jagged),
        "f": torch.float32,
    }
    assert [tuple(t.shape) for t in tensors_in(batch)] == shapes(describe(batch, [])) == [(2,), (3, 4), (5,)]
