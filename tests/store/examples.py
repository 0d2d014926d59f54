"""Made-up machines, profiles and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.profiles import Profile, ProfileKey
from lightning_hotcompile.store.samples import CompileSample
from lightning_hotcompile.store.store import Store

WHEN = "2026-01-31T12:00:00+00:00"
LATER = "2026-02-01T12:00:00+00:00"
NOW = 1_775_000_000.0
"""Seconds since 1970, in April 2026."""

MACHINE = Machine(
    cpu="Made-up 9000", vector="AVX2", cores=4, threads=2, devices=("H1 9.0",), system="Linux x86_64"
)


def key(plan: str = "p1", **fields: Any) -> ProfileKey:
    return ProfileKey(
        **{
            "plan": plan,
            "signature": "s1",
            "machine": MACHINE,
            "torch": "2.13.0",
            "package": "0.1.0",
            **fields,
        }
    )


def path_of(store: Store, key: ProfileKey) -> Path:
    """The file of the profile with this key, whether it is there or not."""
    return store._records.path_of(key)


def profile(plan: str = "p1", **fields: Any) -> Profile:
    known = {
        "key": key(plan),
        "verdict": "good",
        "reason": "faster: 1.30x",
        "scope": "step",
        "when": WHEN,
        "eager_parts": ("optimizer",),
        "tried": ("step", "module"),
        "speedup": 1.3,
        "speedup_low": 1.2,
        "speedup_high": 1.4,
        "pairs": 40,
        "eager_s": 0.013,
        "compiled_s": 0.01,
        "compile_s": 20.5,
    }
    return Profile(**{**known, **fields})


def unmeasured(plan: str = "p1", **fields: Any) -> Profile:
    none = {"speedup": None, "speedup_low": None, "speedup_high": None, "pairs": 0}
    costs = {"eager_s": None, "compiled_s": None, "compile_s": None}
    return profile(plan, **{"verdict": "unknown", "reason": "ended early", **none, **costs, **fields})


def sample(seconds: float = 20.0, **fields: Any) -> CompileSample:
    known = {
        "assumed_s": 38.0,
        "by_child": False,
        "when": WHEN,
    }
    return CompileSample(**{"seconds": seconds, **known, **fields})


def store_in(folder: Path, **options: Any) -> Store:
    return Store(folder / "store", **{"machine": MACHINE, "now": lambda: NOW, **options})
