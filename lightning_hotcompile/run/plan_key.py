"""What names a plan in the store and in checkpoints."""

from __future__ import annotations

import hashlib

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan.planner import CompilePlan


def key_of(plan: CompilePlan, config: HotCompileConfig, stage: str) -> str:
    """Sixteen hexadecimal digits for a plan and the options that change what is compiled."""
    backend = config.backend if isinstance(config.backend, str) else getattr(config.backend, "__name__", "")
    options = sorted((config.options or {}).items(), key=lambda item: item[0])
    parts = (
        plan.digest,
        stage,
        config.scope,
        config.compile_optimizer,
        backend,
        config.mode,
        options,
        config.dynamic,
        config.random,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
