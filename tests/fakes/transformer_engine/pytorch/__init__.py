"""The layers and the autocast, by the names that users import."""

from transformer_engine.pytorch.module import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    body_calls,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast
from transformer_engine.pytorch.transformer import DropPath, RotaryPositionEmbedding, TransformerLayer

__all__ = [
    "DropPath",
    "FP8GlobalStateManager",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "body_calls",
]
