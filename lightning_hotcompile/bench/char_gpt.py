"""A small byte-level GPT: the default case of the recipes and of the benchmarks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

Batch = tuple[Tensor, Tensor]


def rope_tables(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles (Su et al., RoFormer, 2021).

    Returns:
        Two float32 tensors of shape ``(length, head_dim / 2)``.
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels by an angle that grows with the position.

    Args:
        x: queries or keys, shape ``(batch, heads, time, head_dim)``; channel ``i`` of the first half
            is paired with channel ``i`` of the second half.
        cos: shape ``(time, head_dim / 2)``.
        sin: shape ``(time, head_dim / 2)``.

    Returns:
        Shape and dtype of ``x``; vector lengths are kept.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    # Under autocast x is bf16 and the tables are fp32: attention wants q, k and v of one dtype.
    return rotated.to(x.dtype)


def attend(qkv: Tensor, n_head: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal self-attention with rotary positions, without the projections before and after it.

    Args:
        qkv: queries, keys and values side by side, shape ``(batch, time, 3 * d_model)``.
        n_head: number of heads that ``d_model`` is divided into.
        cos: rotation table, shape ``(time, head_dim / 2)``.
        sin: rotation table, shape ``(time, head_dim / 2)``.

    Returns:
        The heads' outputs side by side, shape ``(batch, time, d_model)``.
    """
    batch, time, width = qkv.shape
    q, k, v = qkv.view(batch, time, 3, n_head, width // 3 // n_head).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads.transpose(1, 2).reshape(batch, time, width // 3)


class Attention(nn.Module):
    """Causal self-attention: one projection in, :func:`attend`, one projection out."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape ``(batch, time, d_model)`` in and out."""
        y: Tensor = self.out(attend(self.qkv(x), self.n_head, cos, sin))
        return y


class SwiGLU(nn.Module):
    """Gated feed-forward layer ``down(silu(gate(x)) * up(x))`` (Shazeer, GLU variants, 2020)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(..., d_model)`` in and out."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One pre-norm transformer block: attention and SwiGLU, each with RMSNorm and residual."""

    def __init__(self, d_model: int, n_head: int, d_ff: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.attention = Attention(d_model, n_head)
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.mlp = SwiGLU(d_model, d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape ``(batch, time, d_model)`` in and out."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


def warmup_cosine(step: int, warmup_steps: int, total_steps: float, floor: float) -> float:
    """Factor on the learning rate: linear from near 0 to 1, then a cosine down to ``floor``.

    An infinite ``total_steps`` keeps the factor at 1 after the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class CharGPT(LightningModule):
    """Next-byte prediction with rotary positions, RMSNorm, SwiGLU and causal attention.

    ``training_step`` is one graph of tensor code: no branch depends on data, the rotation tables
    are buffers, and the metric object is used in validation only.

    Args:
        d_model: width of the residual stream; a multiple of ``2 * n_head``.
        n_layer: number of identical blocks in ``blocks``.
        n_head: attention heads a block.
        block_size: longest sequence, in tokens.
        vocab_size: number of token values; 256 for bytes.
        d_ff: width of the feed-forward layer; ``None`` takes 8/3 of ``d_model``, rounded up to 16.
        rope_base: base of the rotation frequencies.
        lr: AdamW's learning rate at the end of the warm-up.
        betas: AdamW's moment decays.
        weight_decay: AdamW's decay, on matrices only.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: optimizer steps until the cosine ends; ``None`` takes the Trainer's own estimate.
        lr_floor: where the cosine ends, as a fraction of ``lr``.

    Raises:
        ValueError: ``d_model`` cannot be divided into heads of even width.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        *,
        d_model: int,
        n_layer: int,
        n_head: int,
        block_size: int,
        vocab_size: int = 256,
        d_ff: int | None = None,
        rope_base: float = 10_000.0,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
        total_steps: int | None = None,
        lr_floor: float = 0.1,
    ) -> None:
        super().__init__()
        if d_model % (2 * n_head):
            raise ValueError(
                f"d_model={d_model} cannot be divided into n_head={n_head} heads of even width: "
                f"give a multiple of {2 * n_head}."
            )
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(n_layer))
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.val_perplexity = Perplexity()
        cos, sin = rope_tables(block_size, d_model // n_head, rope_base)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.apply(self._initialise)

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward layer."""
        asked: int | None = self.hparams["d_ff"]
        return asked or math.ceil(self.hparams["d_model"] * 8 / 3 / 16) * 16

    def make_block(self) -> nn.Module:
        """One block of ``blocks``; override it for another kind of layer with the same ``forward``."""
        return Block(self.hparams["d_model"], self.hparams["n_head"], self.d_ff)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape ``(batch, time, vocab_size)`` from token ids of shape ``(batch, time)``."""
        time = tokens.shape[1]
        cos, sin = self.rope_cos[:time], self.rope_sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats a token, logged as ``train/loss``."""
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/perplexity``, both over the whole epoch and all ranks."""
        tokens, targets = batch
        logits = self(tokens)
        self.val_perplexity.update(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val/loss", loss, sync_dist=True)
        self.log("val/perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, and a warm-up with cosine that moves once an optimizer step."""
        config = self.hparams
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=tuple(config["betas"]))
        total = config["total_steps"] or self.trainer.estimated_stepping_batches
        factor = partial(
            warmup_cosine, warmup_steps=config["warmup_steps"], total_steps=total, floor=config["lr_floor"]
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }
