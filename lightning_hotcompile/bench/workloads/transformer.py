"""Training steps of GPTs in the usual sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hotcompile.bench.char_gpt import CharGPT
from lightning_hotcompile.bench.workloads.workload import DTYPES, Workload, generator
from lightning_hotcompile.errors import ConfigError, near_names

SIZES = {
    "tiny": (128, 512, 2, 4),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
}
"""Width, width of the feed-forward layer, layers and heads."""


class LanguageModel(nn.Module):
    """Mean cross-entropy of the next token."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss of tokens and targets, both of shape ``(batch, length)``."""
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())


def _adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def transformer(
    *,
    model_size: str,
    context_length: int,
    batch_size: int = 4,
    vocab_size: int = 10_000,
    dtype: str = "fp32",
) -> Workload:
    """A pre-norm GPT with rotary positions and SwiGLU, with AdamW.

    Raises:
        ConfigError: the size is not one of :data:`SIZES`.
    """
    if model_size not in SIZES:
        hint = near_names(model_size, SIZES)
        raise ConfigError(f"model_size={model_size!r} is unknown: use {', '.join(SIZES)}{hint}.")
    d_model, d_ff, layers, heads = SIZES[model_size]
    net = CharGPT(
        d_model=d_model,
        n_layer=layers,
        n_head=heads,
        block_size=context_length,
        vocab_size=vocab_size,
        d_ff=d_ff,
    )
    made = generator()
    tokens, targets = (
        torch.randint(0, vocab_size, (batch_size, context_length), generator=made) for _ in range(2)
    )
    return Workload(
        module=LanguageModel(net).to(DTYPES[dtype]),
        inputs=(tokens, targets),
        make_optimizer=_adamw,
        facts={"d_model": d_model, "d_ff": d_ff, "num_layers": layers, "num_heads": heads},
    )
