"""Layers that must stay eager, and what can be compiled around them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.bench.char_gpt import apply_rope, rope_tables
from lightning_hotcompile.bench.te_gpt import fp8_context, transformer_engine
from lightning_hotcompile.bench.workloads.workload import DTYPES, Compile, Workload, generator, twin, whole
from lightning_hotcompile.errors import PlanError
from lightning_hotcompile.plan.islands import find_islands
from lightning_hotcompile.swap.islands import IslandGuard

STAND_IN = "stand-in: torch's Linear in place of TransformerEngine's"


class StandInLinear(nn.Linear):
    """Takes the place of ``te.Linear`` where TransformerEngine cannot run."""


class Rope(nn.Module):
    """Rotary positions on queries and keys."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int) -> None:
        super().__init__()
        cos, sin = rope_tables(length, head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, heads, length, head_dim)`` in and out."""
        return apply_rope(x, self.cos, self.sin)


def rope(
    *,
    batch_size: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: str = "fp32",
    training: bool = False,
) -> Workload:
    """Rotary positions alone."""
    x = torch.randn(batch_size, heads, seq_len, head_dim, generator=generator()).to(DTYPES[dtype])
    x.requires_grad_(training)
    return Workload(module=Rope(seq_len, head_dim), inputs=(x,), training=training)


def split_and_rotate(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of shape ``(batch, heads, length, head_dim)``, the first two rotated."""
    batch, length, width = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4).unbind(0)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def combine(heads: Tensor) -> Tensor:
    """Heads ``(batch, heads, length, head_dim)`` side by side: ``(batch, length, width)``."""
    return heads.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A pre-norm block whose linear layers are given by ``linear``."""

    def __init__(self, hidden: int, heads: int, ffn: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, ffn), linear(ffn, hidden)
        self.split_and_rotate: Callable[..., Any] = split_and_rotate
        self.combine: Callable[[Tensor], Tensor] = combine

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape ``(batch, length, hidden)`` in and out."""
        q, k, v = self.split_and_rotate(self.qkv(self.norm1(x)), self.heads, cos, sin)
        x = x + self.out(self.combine(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Stack(nn.Module):
    """Some blocks and the rotation tables."""

    cos: Tensor
    sin: Tensor

    def __init__(self, blocks: list[Block], seq_len: int, head_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        cos, sin = rope_tables(seq_len, head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, length, hidden)`` in and out."""
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def only_rope_and_reshapes(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
    """The functions between the linear layers, each compiled; all else eager."""
    changed = twin(module)
    rotate, join = compile_function(split_and_rotate), compile_function(combine)
    for block in _blocks(changed):
        block.split_and_rotate, block.combine = rotate, join
    return changed


def blocks_around_islands(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
    """Each block compiled, its linear layers kept eager inside."""
    changed = twin(module)
    keep = ("StandInLinear",) if any(isinstance(m, StandInLinear) for m in module.modules()) else ()
    IslandGuard(changed, [island.name for island in find_islands(changed, keep)]).put()
    compiled = compile_function(Block.forward)
    for block in _blocks(changed):
        block.forward = functools.partial(compiled, block)  # type: ignore[method-assign]
    return changed


def _blocks(stack: nn.Module) -> list[Block]:
    return [module for module in stack.modules() if isinstance(module, Block)]


def surgical(
    *,
    batch_size: int,
    seq_len: int,
    hidden: int,
    heads: int,
    layers: int,
    ffn: int,
    dtype: str = "fp32",
    training: bool = True,
    device: str = "cpu",
) -> Workload:
    """Blocks of TransformerEngine's linear layers under FP8 where it runs, else of stand-ins."""
    linear, context, note = _layers(device, DTYPES[dtype])
    torch.manual_seed(0)  # TransformerEngine draws from the device's generator, which torch seeds too
    module = Stack([Block(hidden, heads, ffn, linear) for _ in range(layers)], seq_len, hidden // heads)
    x = torch.randn(batch_size, seq_len, hidden, generator=generator()).to(DTYPES[dtype])
    return Workload(
        module=module.to(DTYPES[dtype]),
        inputs=(x.requires_grad_(training),),
        arms={"surgical": only_rope_and_reshapes, "islands": blocks_around_islands, "bare compile": whole},
        training=training,
        make_optimizer=(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4)) if training else None,
        context=context,
        note=note,
    )


def _layers(
    device: str, dtype: torch.dtype
) -> tuple[Callable[..., nn.Module], Callable[[], contextlib.AbstractContextManager[Any]], str]:
    """The linear layer, what its forward runs in, and a note."""
    if device == "cpu":
        return StandInLinear, contextlib.nullcontext, STAND_IN
    try:
        te = transformer_engine()
    except PlanError as error:
        return StandInLinear, contextlib.nullcontext, f"{STAND_IN} ({error})"
    make = functools.partial(te.Linear, params_dtype=dtype, device=device)
    available: Any = (getattr(te, "is_fp8_available", None) or te.fp8.is_fp8_available)()
    if not (available[0] if isinstance(available, tuple) else available):  # older ones add the reason
        return make, contextlib.nullcontext, "TransformerEngine without FP8, which this device lacks"
    return make, functools.partial(fp8_context, "DelayedScaling"), "TransformerEngine under FP8"
