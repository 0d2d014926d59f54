"""Which optimizers' steps can be compiled, and which have a fused kernel of torch's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.plan.scopes import Region

COMPILABLE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Optimizers of ``torch.optim`` whose multi-tensor step captures as one graph."""

MAY_LIE_UNDER = "_hotcompile_may_lie_under"
"""On a ``step`` that was put in place of torch's: its own id if a compiled one may be put over it, else 0.

Who wraps it with ``functools.wraps`` copies the mark, but not the id.
"""

_KEEP_32_BIT = frozenset(["ASGD", "NAdam"])
"""Those that keep more than a count beside their parameters, in 32 bit whatever these have."""

HAVE_FUSED = frozenset(["Adagrad", "Adam", "AdamW", "SGD"])
"""Optimizers of ``torch.optim`` with ``fused=True`` for the CPU."""


def optimizer_regions(
    optimizers: Sequence[Any], wanted: bool | str, scope: str, *, fused: bool
) -> tuple[tuple[Region, ...], tuple[str, ...]]:
    """The optimizers that are compiled, and a note on each other one.

    Args:
        optimizers: of the Trainer.
        wanted: ``True``, ``False`` or ``"auto"``.
        scope: of the plan.
        fused: whether torch's fused kernels are tried where there are any.
    """
    if wanted is False or not optimizers:
        return (), ()
    regions, notes = [], []
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if fused and (has_kernel(optimizer) or why_not_fused(optimizer) is None):
            notes.append(f"optimizer {index} ({name}) is not compiled: torch has a fused kernel for it")
            continue
        if wanted == "auto" and scope != "step":
            reason: str | None = f"with scope {scope!r} it is compiled only if asked for"
        else:
            reason = why_not_compiled(optimizer)
        if reason is not None:
            notes.append(f"optimizer {index} ({name}) stays eager: {reason}")
            continue
        regions.append(
            Region(
                name=f"optimizer {index}",
                kind="optimizer",
                members=(str(index),),
                class_name=name,
                tensors=sum(len(group["params"]) for group in optimizer.param_groups),
            )
        )
    return tuple(regions), tuple(notes)


def has_kernel(optimizer: Any) -> bool:
    """Whether its step was replaced by one that has torch's fused kernel do the update."""
    return _is_ours(vars(optimizer).get("step"))


def _is_ours(step: Any) -> bool:
    step = getattr(step, "__func__", step)
    return step is not None and getattr(step, MAY_LIE_UNDER, 0) == id(step)


def is_compilable_kind(optimizer: Any) -> bool:
    """Whether its class is one of PyTorch's own whose step can be compiled."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in COMPILABLE


def why_not_compiled(optimizer: Any) -> str | None:
    """Why this optimizer's step stays eager, or ``None`` if it can be compiled."""
    kind = type(optimizer)
    if not is_compilable_kind(optimizer):
        name = f"{kind.__module__}.{kind.__name__}" if kind.__name__ in COMPILABLE else kind.__name__
        return f"{name} is not one of torch.optim's multi-tensor optimizers"
    if _is_wrapped(optimizer, over_kernel=True):
        return "its step was wrapped or replaced, and what stands around it has to run"
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "it is fused already"
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    if any(p.is_sparse for group in groups for p in group["params"]):
        return "it has sparse parameters"
    if kind.__name__ in _KEEP_32_BIT and any(p.dtype is torch.float64 for g in groups for p in g["params"]):
        return (
            "numbers of its state are in 32 bit, and compiled code computes updates of 64 bits from them so"
        )
    if kind.__name__ == "NAdam" and any(_waits_for_host(group) for group in groups):
        return "a number of its state stays in host memory: NAdam(capturable=True) has it on the device"
    return None


def _waits_for_host(group: Mapping[str, Any]) -> bool:
    return not group.get("capturable") and any(p.device.type != "cpu" for p in group["params"])


def why_not_fused(optimizer: Any) -> str | None:
    """Why torch's fused kernel for the CPU is not to be used for this optimizer, or ``None``.

    Only where nobody has chosen: ``foreach`` and ``fused`` are ``None``, as they are by default.
    """
    kind = type(optimizer)
    if kind.__name__ not in HAVE_FUSED or getattr(torch.optim, kind.__name__, None) is not kind:
        return f"{kind.__name__} is not one of torch.optim's optimizers with a fused kernel for the CPU"
    if getattr(vars(optimizer).get("step"), MAY_LIE_UNDER, None) == 0:
        return "it is compiled"
    if _is_wrapped(optimizer):
        return "its step was wrapped or replaced, and what stands around it has to run"
    for group in optimizer.param_groups:
        for name in ("fused", "foreach"):
            if group.get(name) is not None:
                return f"{name}={group[name]} was asked for"
        for name in ("differentiable", "capturable"):
            if group.get(name):
                return f"it is {name}"
        if kind is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]:
            return "SGD without momentum and decay is one call for each tensor already"
        if any(map(_holds_tensor, (v for k, v in group.items() if k in optimizer.defaults))):
            return "a setting of it is a tensor"
        if not all(map(_is_plain, group["params"])):
            return "not all of its parameters are plain 32-bit or 64-bit tensors on the CPU"
        if len({parameter.dtype for parameter in group["params"]}) > 1:
            return "a group of it has parameters of several dtypes"
    return None


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_holds_tensor, value)))


def _is_plain(parameter: Tensor) -> bool:
    ours = type(parameter) in (Tensor, torch.nn.Parameter)
    return ours and parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64)


def _is_wrapped(optimizer: Any, *, over_kernel: bool = False) -> bool:
    """Whether any layer of ``step``, on the instance or the class, is not PyTorch's own.

    PyTorch's layers are its profiling, its grad mode and the counter of its LR schedulers. ``over_kernel``:
    the one that has its fused kernel do the update is none that has to run either.
    """
    steps = [type(optimizer).step, *[s for s in [vars(optimizer).get("step")] if s is not None]]
    return any(not _is_torchs_own(step, over_kernel) for step in steps)


def _is_torchs_own(step: Any, over_kernel: bool) -> bool:
    while step is not None:
        step = getattr(step, "__func__", step)
        in_torch = getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim.")
        if not in_torch and not (over_kernel and _is_ours(step)):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
