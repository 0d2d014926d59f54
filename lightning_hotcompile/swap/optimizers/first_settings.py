"""The settings of optimizers as they were when training began: what a schedule moves differs from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import is_compilable_kind

Settings = list[dict[str, Any]]
"""Of one optimizer, by group."""


class FirstSettings:
    """Settings of optimizers that can be compiled, the learning rate left out.

    Args:
        optimizers: of which they are kept as they are now.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        # Weak: compiled code, which knows this, may be kept for longer than there is a training.
        self._first: WeakKeyDictionary[Optimizer, Settings] = WeakKeyDictionary()
        for optimizer in optimizers:
            self.keep(optimizer)

    def keep(self, optimizer: Any) -> None:
        """Keep them as they are now, unless they were kept before."""
        if is_compilable_kind(optimizer) and optimizer not in self._first:
            self._first[optimizer] = _settings(optimizer)

    def moved(self, optimizer: Optimizer) -> list[str]:
        """Names of those that have another value now."""
        groups = zip(self._first.get(optimizer, ()), _settings(optimizer), strict=False)
        return sorted({name for first, now in groups for name in first if first[name] != now.get(name)})


def _settings(optimizer: Optimizer) -> Settings:
    """What each group has of the optimizer's own options: plain numbers only."""
    plain = (bool, int, float, tuple)
    return [
        {k: v for k, v in group.items() if k in optimizer.defaults and k != "lr" and isinstance(v, plain)}
        for group in optimizer.param_groups
    ]
