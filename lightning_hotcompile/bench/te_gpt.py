"""The GPT of ``char_gpt`` with TransformerEngine layers; the glue between them stays plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hotcompile.bench.char_gpt import Batch, CharGPT, attend
from lightning_hotcompile.errors import ConfigError, PlanError, near_names

RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")


def transformer_engine() -> Any:
    """The module ``transformer_engine.pytorch``.

    Raises:
        PlanError: it is not installed, or it is installed and cannot start on this machine.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(
            f"TEGPT needs TransformerEngine, which cannot be imported ({reason}): "
            "pip install 'lightning-hotcompile[te]' on a machine with a CUDA GPU."
        ) from error


def fp8_context(recipe: str) -> contextlib.AbstractContextManager[Any]:
    """TransformerEngine's autocast to FP8 by the recipe class of this name, under its old or new name."""
    te = transformer_engine()
    scaling = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
    if hasattr(te, "autocast"):
        context: contextlib.AbstractContextManager[Any] = te.autocast(enabled=True, recipe=scaling)
        return context
    older: contextlib.AbstractContextManager[Any] = te.fp8_autocast(enabled=True, fp8_recipe=scaling)
    return older


class TEBlock(nn.Module):
    """A pre-norm block: both norms, all projections and the SwiGLU are TransformerEngine's."""

    def __init__(self, d_model: int, n_head: int, d_ff: int) -> None:
        super().__init__()
        te = transformer_engine()
        common: dict[str, Any] = {
            "bias": False,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "params_dtype": torch.float32,
        }
        norm: dict[str, Any] = {"eps": 1e-6, "normalization": "RMSNorm"}
        self.n_head = n_head
        self.qkv = te.LayerNormLinear(d_model, 3 * d_model, **norm, **common)
        self.out = te.Linear(d_model, d_model, **common)
        self.mlp = te.LayerNormMLP(d_model, d_ff, activation="swiglu", **norm, **common)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape ``(batch, time, d_model)`` in and out."""
        x = x + self.out(attend(self.qkv(x), self.n_head, cos, sin))
        y: Tensor = x + self.mlp(x)
        return y


class TEGPT(CharGPT):
    """:class:`CharGPT` with ``te.LayerNormLinear``, ``te.Linear`` and ``te.LayerNormMLP``.

    Rotary positions, split and join of the heads, attention, residuals, embedding, head and loss are
    plain PyTorch. It needs a CUDA GPU, for FP8 one of the Hopper generation or later.

    Args:
        fp8: run the layers in FP8 in ``training_step``; sizes must then be multiples of 16.
        fp8_recipe: class name of a recipe without arguments in ``transformer_engine.common.recipe``.
        **options: the arguments of :class:`CharGPT`.

    Raises:
        PlanError: TransformerEngine cannot be imported.
        ConfigError: the recipe is not known.
    """

    def __init__(self, *, fp8: bool = False, fp8_recipe: str = "DelayedScaling", **options: Any) -> None:
        transformer_engine()
        if fp8_recipe not in RECIPES:
            raise ConfigError(
                f"fp8_recipe={fp8_recipe!r} is not known: use one of {', '.join(RECIPES)}"
                f"{near_names(fp8_recipe, RECIPES)}"
            )
        super().__init__(**options)
        self.fp8 = fp8
        self.fp8_recipe = fp8_recipe

    def make_block(self) -> nn.Module:
        """One block of TransformerEngine layers."""
        return TEBlock(self.hparams["d_model"], self.hparams["n_head"], self.d_ff)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """As in :class:`CharGPT`, with the whole model under FP8 autocast if that is wished."""
        with fp8_context(self.fp8_recipe) if self.fp8 else contextlib.nullcontext():
            return super().training_step(batch, batch_idx)
