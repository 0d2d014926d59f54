"""The quick test of a batch says what a comparison of descriptions says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hotcompile.watch.structure import FamilyShape, describe, matcher

LABELS = torch.zeros(4, dtype=torch.long)
CPU = torch.device("cpu")


def batch(kind: type = tuple) -> Any:
    return kind((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)))


OTHERS = {
    "shape": (torch.zeros(2, 3), LABELS),
    "dtype": (torch.zeros(4, 3, dtype=torch.float64), LABELS),
    "device": (torch.zeros(4, 3, device="meta"), LABELS),
    "requires grad": (torch.zeros(4, 3, requires_grad=True), LABELS),
    "strides": (torch.zeros(3, 4).T, LABELS),
    "subclass": (
        torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False),
        LABELS,
    ),
    "sparse": (torch.zeros(4, 3).to_sparse(), LABELS),
    "nested": (torch.nested.nested_tensor([torch.zeros(3)]), LABELS),
    "order": (LABELS, torch.zeros(4, 3)),
    "fewer": (torch.zeros(4, 3),),
    "more": (torch.zeros(4, 3), LABELS, torch.zeros(1)),
    "no tensor": (torch.zeros(4, 3), 4),
    "none": None,
    "a tensor": torch.zeros(4, 3),
    "a dict": {"x": torch.zeros(4, 3), "y": LABELS},
}


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_that_is_described_alike_matches(kind: type) -> None:
    matches = matcher(describe(batch(kind), []))
    assert matches is not None
    assert matches(batch(kind))
    assert not matches(batch(list if kind is tuple else tuple))


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_described_in_another_way_does_not_match(what: str) -> None:
    matches = matcher(describe(batch(), []))
    assert matches is not None
    if what != "subclass":  # described alike, and left to the comparison of descriptions
        assert describe(OTHERS[what], []) != describe(batch(), [])
    assert not matches(OTHERS[what])


@pytest.mark.parametrize(
    "described",
    [
        describe({"x": torch.zeros(2)}, []),
        describe((torch.zeros(2), [torch.zeros(2)]), []),
        describe((torch.zeros(3, 4).T,), []),
        describe((torch.zeros(2).to_sparse(),), []),
        describe(torch.zeros(2), []),
        describe(3, []),
        (
            "tuple",
            ("Tensor", FamilyShape(("s0", 3)), torch.float32, CPU, False, "contiguous"),
        ),
    ],
    ids=["mapping", "inner list", "transposed", "sparse", "tensor", "number", "family"],
)
def test_what_is_not_simple_is_left_to_the_comparison(described: Any) -> None:
    assert matcher(described) is None
