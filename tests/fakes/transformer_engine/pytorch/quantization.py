"""The global FP8 state, the autocast that enters it, and the scales of delayed scaling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling, Recipe


class ScalingState:
    """Amax history and scales of one module in one direction: plain tensors, not buffers."""

    def __init__(self, recipe: Recipe, fp8_max: float, dtype: torch.dtype, count: int) -> None:
        self.fp8_max = fp8_max
        self.dtype = dtype
        self.delayed = isinstance(recipe, DelayedScaling)
        length = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 1
        self.amax_history = torch.zeros(length, count)
        self.scale = torch.ones(count)

    def quantize(self, x: Tensor, index: int) -> Tensor:
        """A round trip through FP8; with delayed scaling by the scale of earlier steps."""
        amax = x.detach().abs().max().float()
        if self.delayed:
            self.amax_history[0, index] = amax
            scale = self.scale[index]
        else:
            scale = torch.where(amax > 0, self.fp8_max / amax, 1.0)
        return ((x * scale).clamp(-self.fp8_max, self.fp8_max).to(self.dtype).to(x.dtype)) / scale

    @torch._dynamo.disable  # stands in for a kernel that Dynamo cannot see into
    def update(self) -> None:
        amax = self.amax_history.max(0).values
        self.scale.copy_(torch.where(amax > 0, self.fp8_max / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()


@dataclass
class QuantizationState:
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    scaling: dict[str, list[ScalingState]] = field(default_factory=lambda: {"fwd": [], "bwd": []})


_AUTOCAST_FIELDS = (
    "fp8_enabled",
    "fp8_calibration",
    "fp8_recipe",
    "fp8_distributed_group",
    "is_first_fp8_module",
    "fp8_graph_capturing",
)


class FP8GlobalStateManager:
    quantization_state = QuantizationState()

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = QuantizationState()

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return tuple(getattr(cls.quantization_state, name) for name in _AUTOCAST_FIELDS)

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        for name, value in zip(_AUTOCAST_FIELDS, state, strict=True):
            setattr(cls.quantization_state, name, value)

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True for the first module that asks inside of an outermost autocast, and only then."""
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def register(cls, fp8_meta: dict[str, Any]) -> None:
        """Take a module's scales into the update at the end of each step, once."""
        if "buffer_index" not in fp8_meta:
            fp8_meta["buffer_index"] = len(cls.quantization_state.scaling["fwd"])
            for direction, states in cls.quantization_state.scaling.items():
                states.append(fp8_meta[f"scaling_{direction}"])

    @classmethod
    def update(cls, direction: str) -> None:
        for state in cls.quantization_state.scaling[direction]:
            state.update()


class autocast:
    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None, group: Any = None
    ) -> None:
        self._arguments = (enabled, calibrating, recipe, group)
        self._saved: tuple[Any, ...] | None = None

    def __enter__(self) -> autocast:
        enabled, calibrating, recipe, group = self._arguments
        if enabled and torch.compiler.is_compiling() and isinstance(recipe, DelayedScaling):
            raise RuntimeError("DelayedScaling is not supported under torch.compile.")
        self._saved = FP8GlobalStateManager.get_autocast_state()
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled, state.fp8_calibration = enabled, calibrating
        state.fp8_recipe = DelayedScaling() if recipe is None else recipe
        state.fp8_distributed_group = group
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        assert self._saved is not None
        FP8GlobalStateManager.set_autocast_state(self._saved)
        self._saved = None
        state = FP8GlobalStateManager.quantization_state
        state.autocast_depth -= 1
        if self._arguments[0] and state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.update("fwd")
