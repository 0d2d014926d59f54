"""Softmax attention written out, beside the fused operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.bench.workloads.workload import COMPILED, DTYPES, Workload, generator, whole


class Attention(nn.Module):
    """``softmax(Q K^T / sqrt(d)) V`` of one head; the scores are a tensor of ``length * length``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shape ``(batch, length, d)`` in and out."""
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5)
        return torch.softmax(scores, -1) @ v


def attention(*, batch_size: int, seq_len: int, d_model: int, dtype: str = "fp32") -> Workload:
    """Forward and backward; the arm ``sdpa`` is PyTorch's own fused attention, eager."""
    made = generator()
    inputs = [
        torch.randn(batch_size, seq_len, d_model, generator=made).to(DTYPES[dtype]).requires_grad_()
        for _ in range(3)
    ]
    return Workload(
        module=Attention(),
        inputs=tuple(inputs),
        arms={COMPILED: whole},
        others={"sdpa": F.scaled_dot_product_attention},
    )
