"""Trainings with einops, whose patterns are parsed into sets of names behind a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

einops = pytest.importorskip("einops", reason="einops is in the extra 'test'")


class Patched(Net):
    """A transformer's way from patches to tokens and through the heads of an attention."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = pytest.importorskip("einops.layers.torch")
        self.patches = layers.Rearrange("b (h p) -> b h p", p=2)
        self.token = nn.Parameter(torch.zeros(1, 1, 2))
        self.qkv = nn.Linear(2, 12, bias=False)  # that of a key has no gradient

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x)
        first = einops.repeat(self.token, "() n d -> b n d", b=len(tokens))
        parts = self.qkv(torch.cat([first, tokens], dim=1)).chunk(3, dim=-1)
        q, k, v = (einops.rearrange(part, "b n (h d) -> b h n d", h=2) for part in parts)
        mixed = einops.rearrange((q @ k.mT).softmax(-1) @ v, "b h n d -> b n (h d)")
        pooled = einops.reduce(mixed, "b n d -> b d", "mean")
        return super().forward(x + einops.repeat(pooled, "b d -> b (d two)", two=2))


def test_a_step_with_einops_has_no_graph_break() -> None:
    plain, model = seeded(Patched), seeded(Patched)
    callback = hot(scope="step")
    fit(plain)
    fit(model, [callback])
    assert_proven(callback.report)
    assert_same(plain, model)
    assert callback.report.graph_breaks == 0
