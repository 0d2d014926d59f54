"""What earlier runs have found about torch's fused kernel for an optimizer like this one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_hotcompile.receipt.report import FusedOptimizer
from lightning_hotcompile.store.profiles import Profile, ProfileKey, utc_now
from lightning_hotcompile.store.store import Store
from lightning_hotcompile.watch.stats import Ratio

LASTS = timedelta(days=7)
"""Kernels that were timed longer ago are timed anew: it takes no compiler, and machines change."""

_SIGNATURE = "an update of the weights"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Updates by the loop and by the kernel, as an earlier run has timed them."""

    loop_s: float
    fused_s: float
    speedup: Ratio
    when: str


class FusedMemory:
    """The store, asked about optimizers.

    Args:
        store: ``None`` means no memory.
        reads: whether anything is to be known; what is learned is kept all the same.
        now: the clock, in the form of :func:`~lightning_hotcompile.store.profiles.utc_now`.
    """

    def __init__(self, store: Store | None, *, reads: bool = True, now: Callable[[], str] = utc_now) -> None:
        self._store = store
        self._reads = reads
        self._now = now

    def of(self, optimizer: Optimizer, confidence: float) -> Timed | None:
        """What an earlier run has found, on this machine and with these versions.

        Args:
            optimizer: of this run; one with the same class, settings and shapes counts as the same.
            confidence: with which intervals were kept.
        """
        if self._store is None or not self._reads:
            return None
        profile = self._store.find(self._key(optimizer))
        if profile is None or not self._is_recent(profile.when):
            return None
        value, low, high = profile.speedup, profile.speedup_low, profile.speedup_high
        loop_s, fused_s = profile.eager_s, profile.compiled_s
        if value is None or low is None or high is None or loop_s is None or fused_s is None:
            return None
        ratio = Ratio(value=value, low=low, high=high, n=profile.pairs, confidence=confidence)
        return Timed(loop_s=loop_s, fused_s=fused_s, speedup=ratio, when=profile.when)

    def learn(self, optimizer: Optimizer, found: FusedOptimizer) -> None:
        """Keep what this run has timed; nothing where it was not."""
        ratio = found.speedup
        if self._store is None or ratio is None or found.loop_ms is None or found.fused_ms is None:
            return
        profile = Profile(
            key=self._key(optimizer),
            verdict="good" if found.kept else "bad",
            reason=found.reason or f"{ratio.verdict}: {ratio}",
            scope=f"fused {found.class_name}",
            when=self._now(),
            speedup=ratio.value,
            speedup_low=ratio.low,
            speedup_high=ratio.high,
            pairs=ratio.n,
            eager_s=1e-3 * found.loop_ms,
            compiled_s=1e-3 * found.fused_ms,
        )
        self._store.remember(profile)

    def _key(self, optimizer: Optimizer) -> ProfileKey:
        assert self._store is not None
        return self._store.key(plan=digest_of(optimizer), signature=_SIGNATURE)

    def _is_recent(self, when: str) -> bool:
        age = datetime.fromisoformat(self._now()) - datetime.fromisoformat(when)
        return abs(age) < LASTS


def digest_of(optimizer: Optimizer) -> str:
    """What says how long an update takes: the class, which settings are used, and the parameters' shapes.

    Sixteen hexadecimal digits. Of a number in the settings (learning rate, decay) only whether it is 0. What
    else the user keeps in a group is no setting, and may be anything.
    """
    own = optimizer.defaults
    groups = [
        (_settings(group, own), [_shape(p) for p in group["params"]]) for group in optimizer.param_groups
    ]
    return hashlib.blake2b(repr((type(optimizer).__name__, groups)).encode(), digest_size=8).hexdigest()


def _settings(group: Mapping[str, Any], own: Collection[str]) -> list[tuple[str, bool]]:
    return sorted((name, bool(value)) for name, value in group.items() if name in own)


def _shape(parameter: Any) -> tuple[Any, ...]:
    shape = None if is_lazy(parameter) else tuple(parameter.shape)
    return shape, str(parameter.dtype), parameter.requires_grad
