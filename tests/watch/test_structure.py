"""Descriptions of batches tell apart what compiled code would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hotcompile.watch.structure import describe

LABELS = torch.zeros(4, dtype=torch.long)


def batch(kind: type = tuple) -> Any:
    return kind((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)))


OTHERS = {
    "shape": (torch.zeros(2, 3), LABELS),
    "dtype": (torch.zeros(4, 3, dtype=torch.float64), LABELS),
    "device": (torch.zeros(4, 3, device="meta"), LABELS),
    "requires grad": (torch.zeros(4, 3, requires_grad=True), LABELS),
    "strides": (torch.zeros(3, 4).T, LABELS),
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
def test_batches_alike_are_described_alike(kind: type) -> None:
    assert describe(batch(kind), []) == describe(batch(kind), [])
    assert describe(batch(kind), []) != describe(batch(list if kind is tuple else tuple), [])


@pytest.mark.parametrize("what", OTHERS)
def test_another_batch_is_described_in_another_way(what: str) -> None:
    assert describe(OTHERS[what], []) != describe(batch(), [])
