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
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "it is fused already"
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    if any(p.is_sparse for group in groups for p in group["params"]):
        return "it has sparse parameters"
    return None
