"""Modules whose parameters FSDP2 (``fully_shard``) gathers before and frees after each call."""

from __future__ import annotations

from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module itself; it makes a subclass of its class."""
    return any(
        kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )


def holds_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module or one below it."""
    return any(map(is_sharded, module.modules()))
