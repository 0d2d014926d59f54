"""Which optimizers' steps can be compiled."""

from __future__ import annotations

from typing import Any

COMPILABLE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Optimizers of ``torch.optim`` whose multi-tensor step captures as one graph."""


def why_not_compiled(optimizer: Any) -> str | None:
    """Why this optimizer's step stays eager, or ``None`` if it can be compiled."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in COMPILABLE:
        return f"{kind.__name__} is not one of torch.optim's multi-tensor optimizers"
    if _is_wrapped(optimizer):
        return "its step was wrapped or replaced, and what stands around it has to run"
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "it is fused already"
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    if any(p.is_sparse for group in groups for p in group["params"]):
        return "it has sparse parameters"
    return None


def _is_wrapped(optimizer: Any) -> bool:
    """Whether any layer of ``step``, on the instance or the class, is not PyTorch's own.

    PyTorch's layers are its profiling, its grad mode and the counter of its LR schedulers.
    """
    steps = [type(optimizer).step, *[s for s in [vars(optimizer).get("step")] if s is not None]]
    return any(not _is_torchs_own(step) for step in steps)


def _is_torchs_own(step: Any) -> bool:
    while step is not None:
        step = getattr(step, "__func__", step)
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
