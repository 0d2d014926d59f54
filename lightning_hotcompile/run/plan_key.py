"""What names a plan in the store and in checkpoints."""

from __future__ import annotations

import functools
import hashlib

import torch

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan.planner import CompilePlan


def key_of(plan: CompilePlan, config: HotCompileConfig, stage: str) -> str:
    """Sixteen hexadecimal digits for a plan and the options that change what is compiled.

    What is measured under anomaly detection, which slows every operation, is of no use to a usual run.
    """
    options = sorted((config.options or {}).items(), key=lambda item: item[0])
    parts = (
        plan.digest,
        stage,
        config.scope,
        config.compile_optimizer,
        name_of(config.backend),
        config.mode,
        options,
        config.dynamic,
        config.random,
        torch.is_anomaly_enabled(),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def name_of(backend: object) -> str:
    """A backend that is an object goes by its class, a partial by its function with what that is given."""
    if isinstance(backend, str):
        return backend
    if isinstance(backend, functools.partial):
        return f"{name_of(backend.func)} {backend.args} {sorted(backend.keywords.items())}"
    named = backend if hasattr(backend, "__qualname__") else type(backend)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"
