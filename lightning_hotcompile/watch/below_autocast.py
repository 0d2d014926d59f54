"""Operations that call others in their turn: torch has autocast switched off in them, below a dispatch mode.

Of torch's own that is the fused encoder layer; others are custom operations, whose kernels may be Python.
Their matrix products would be computed in 32 bits, and what they give would be of another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_ATEN = "torch._ops.aten"
_ENCODER_LAYER = getattr(torch.ops.aten, "_transformer_encoder_layer_fwd", None)
_KEYS = [getattr(torch._C.DispatchKey, f"Autocast{name}") for name in ("CPU", "CUDA", "XPU", "MPS")]


def calls_others(func: Any) -> bool:
    """Whether an operation may call others that autocast has a say in."""
    if func.__class__ is not OpOverload:
        return False
    return func.__module__ != _ATEN or func.overloadpacket is _ENCODER_LAYER


def call_under_autocast(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it from ``__torch_dispatch__`` with autocast as it was where the operation was called."""
    as_called: Any = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
    with as_called():
        excluded = torch._C._dispatch_tls_local_exclude_set()
    now = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        if not excluded.has(key):
            now = now.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), now):
        return call(*args, **kwargs)
