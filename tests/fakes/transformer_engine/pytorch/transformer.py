"""A whole layer, and the two classes that are plain tensor code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_engine.pytorch.module import LayerNormLinear, LayerNormMLP, Linear


class RotaryPositionEmbedding(nn.Module):
    def __init__(self, dim: int, rotary_base: float = 10000.0, **_: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_base ** (-torch.arange(0, dim, 2).float() / dim))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = torch.arange(max_seq_len, device=self.inv_freq.device) + offset
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class DropPath(nn.Module):
    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_state: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        shape = (hidden_state.shape[0], *[1] * (hidden_state.ndim - 1))
        kept = torch.rand(shape, device=hidden_state.device) >= self.drop_prob
        return hidden_state * kept / (1.0 - self.drop_prob)


class TransformerLayer(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads = num_attention_heads
        self.qkv = LayerNormLinear(hidden_size, 3 * hidden_size)
        self.proj = Linear(hidden_size, hidden_size)
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size)
        self.drop_path = DropPath(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + self.drop_path(self.proj(mixed))
        return x + self.drop_path(self.mlp(x))
