"""The layers: FP8 state in ``fp8_meta``, saved by ``get_extra_state``."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_engine.pytorch.jit import no_torch_dynamo
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, ScalingState

# Not in TransformerEngine: class name and "was Dynamo tracing?" of each forward, for the tests.
body_calls: list[tuple[str, bool]] = []


@torch.compiler.assume_constant_result  # Dynamo runs it while it traces, and guards on nothing in it
def _note(name: str, tracing: bool) -> None:
    body_calls.append((name, tracing))


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, module: Any, slot: int) -> Tensor:
        inp = module.quantized("fwd", inp, 2 * slot)
        weight = module.quantized("fwd", weight, 2 * slot + 1)
        ctx.save_for_backward(inp, weight)
        ctx.module, ctx.slot, ctx.has_bias = module, slot, bias is not None
        ctx.updates = module.fp8 and FP8GlobalStateManager.is_first_fp8_module()
        ctx.fp8 = module.fp8
        return F.linear(inp, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inp, weight = ctx.saved_tensors
        low = ctx.module.fp8_meta["scaling_bwd"].quantize(grad, ctx.slot) if ctx.fp8 else grad
        grad_weight = low.flatten(0, -2).t() @ inp.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        if ctx.updates:  # the first module's backward is the last of the step
            FP8GlobalStateManager.update("bwd")
        return low @ weight, grad_weight, grad_bias, None, None


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        centred = inp if bias is None else inp - inp.mean(-1, keepdim=True)
        inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(centred * inverse, inverse, weight)
        ctx.has_bias = bias is not None
        out = centred * inverse * weight
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, weight = ctx.saved_tensors
        scaled = grad * weight
        inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
        if ctx.has_bias:
            inner = inner - scaled.mean(-1, keepdim=True)
        grad_weight = (grad * normal).flatten(0, -2).sum(0)
        return inner * inverse, grad_weight, grad.flatten(0, -2).sum(0) if ctx.has_bias else None, None


class _Norm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, with_bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape)) if with_bias else None

    def forward(self, inp: Tensor) -> Tensor:
        _note(type(self).__name__, torch.compiler.is_compiling())
        return _NormFunction.apply(inp, self.weight, self.bias, self.eps)


class LayerNorm(_Norm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(normalized_shape, eps, with_bias=True)


class RMSNorm(_Norm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(normalized_shape, eps, with_bias=False)


class TransformerEngineBaseModule(nn.Module):
    def __init__(self, gemms: int) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "num_gemms": gemms}

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def prepare_forward(self, inp: Tensor) -> Tensor:
        state = FP8GlobalStateManager.quantization_state
        self.fast_setattr("fp8", state.fp8_enabled)
        self.fp8_meta["fp8_checkpoint"] = state.fp8_enabled
        if not state.fp8_enabled:
            self.fast_setattr("fp8_initialized", False)  # the scales stay
        elif not self.fp8_initialized or self.fp8_meta["recipe"] != state.fp8_recipe:
            self.init_fp8_meta_tensors(state.fp8_recipe)
        if self.fp8 and self.fp8_meta["scaling_fwd"].delayed:
            FP8GlobalStateManager.register(self.fp8_meta)
        return inp.contiguous()

    def end_forward(self) -> None:
        self.fast_setattr("forwarded_at_least_once", True)

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        self.fp8_meta["recipe"] = recipe
        if "scaling_fwd" not in self.fp8_meta:
            maxima, gemms = recipe.fp8_format.value, self.fp8_meta["num_gemms"]
            backward = torch.float8_e4m3fn if maxima.max_bwd == maxima.max_fwd else torch.float8_e5m2
            self.fp8_meta["scaling_fwd"] = ScalingState(
                recipe, maxima.max_fwd, torch.float8_e4m3fn, 2 * gemms
            )
            self.fp8_meta["scaling_bwd"] = ScalingState(recipe, maxima.max_bwd, backward, gemms)
        self.fast_setattr("fp8_initialized", True)

    def quantized(self, direction: str, tensor: Tensor, index: int) -> Tensor:
        return self.fp8_meta[f"scaling_{direction}"].quantize(tensor, index) if self.fp8 else tensor

    def get_extra_state(self) -> Tensor:
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        tensors = {
            key: (self.fp8_meta[key].scale.clone(), self.fp8_meta[key].amax_history.clone())
            for key in ("scaling_fwd", "scaling_bwd")
        }
        state = {"recipe": self.fp8_meta["recipe"], "tensors": tensors}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is None or state.numel() == 0:
            return
        loaded = pickle.loads(state.numpy().tobytes())
        self.init_fp8_meta_tensors(loaded["recipe"])
        for key, (scale, amax_history) in loaded["tensors"].items():
            self.fp8_meta[key].scale.copy_(scale)
            self.fp8_meta[key].amax_history.copy_(amax_history)


class Linear(TransformerEngineBaseModule):
    """Open to Dynamo, but for one helper inside of a ``try``, where a break loses the frame."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **_: Any) -> None:
        super().__init__(gemms=1)
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, inp: Tensor) -> Tensor:
        _note(type(self).__name__, torch.compiler.is_compiling())
        inp = self.prepare_forward(inp)
        try:
            weight, bias = self._get_weight_and_bias()
            out = _LinearFunction.apply(inp, weight, bias, self, 0)
        finally:
            self.end_forward()
        return out

    @torch._dynamo.disable
    def _get_weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


class _LayerNormGemms(TransformerEngineBaseModule):
    def __init__(self, gemms: int, size: int, eps: float, normalization: str) -> None:
        super().__init__(gemms)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(size))
        self.layer_norm_bias = nn.Parameter(torch.zeros(size)) if normalization == "LayerNorm" else None

    def _normalized(self, inp: Tensor) -> Tensor:
        _note(type(self).__name__, torch.compiler.is_compiling())
        return _NormFunction.apply(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps)


class LayerNormLinear(_LayerNormGemms):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        **_: Any,
    ) -> None:
        super().__init__(1, in_features, eps, normalization)
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @no_torch_dynamo()
    def forward(self, inp: Tensor) -> Tensor:
        inp = self._normalized(self.prepare_forward(inp))
        try:
            return _LinearFunction.apply(inp, self.weight, self.bias, self, 0)
        finally:
            self.end_forward()


class LayerNormMLP(_LayerNormGemms):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        **_: Any,
    ) -> None:
        super().__init__(2, hidden_size, eps, normalization)
        self.activation = activation
        wide = 2 * ffn_hidden_size if activation == "swiglu" else ffn_hidden_size
        self.fc1_weight = nn.Parameter(torch.randn(wide, hidden_size) * hidden_size**-0.5)
        self.fc1_bias = nn.Parameter(torch.zeros(wide)) if bias else None
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size) * ffn_hidden_size**-0.5)
        self.fc2_bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    @no_torch_dynamo()
    def forward(self, inp: Tensor) -> Tensor:
        inp = self._normalized(self.prepare_forward(inp))
        try:
            wide = _LinearFunction.apply(inp, self.fc1_weight, self.fc1_bias, self, 0)
            if self.activation == "swiglu":
                gate, value = wide.chunk(2, -1)
                hidden = F.silu(gate) * value
            else:
                hidden = F.gelu(wide)
            return _LinearFunction.apply(hidden, self.fc2_weight, self.fc2_bias, self, 1)
        finally:
            self.end_forward()
