"""Gradients of leaves whose data a run may have replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edges_of(leaves: Sequence[Tensor]) -> list[GradientEdge]:
    """Where their gradients go before a run; one that replaces the data of a leaf gives it another edge.

    None where no gradients are asked for.
    """
    return [get_gradient_edge(leaf) for leaf in leaves] if torch.is_grad_enabled() else []


def gradients_of(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    cotangent_of: Callable[[Tensor], Tensor],
) -> list[Tensor | None]:
    """Those of leaves, be it by an edge that a leaf had before the run."""
    differentiable = [t for t in outputs if t.requires_grad]
    if not (differentiable and leaves and torch.is_grad_enabled()):
        return []
    cotangents = [cotangent_of(t) for t in differentiable]
    both = enumerate(zip(leaves, edges, strict=False))  # no edges where the run itself asks for gradients
    lost = [i for i, (leaf, edge) in both if get_gradient_edge(leaf).node is not edge.node]
    asked: Any = [*leaves, *(edges[i] for i in lost)]
    found: list[Tensor | None] = []
    found += torch.autograd.grad(differentiable, asked, cotangents, allow_unused=True)
    for i, other in zip(lost, found[len(leaves) :], strict=True):
        given = [each for each in (found[i], other) if each is not None]
        found[i] = sum(given[1:], given[0]) if given else None
    return found[: len(leaves)]
