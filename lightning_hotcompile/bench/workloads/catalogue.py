"""All workloads, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.workloads import operations
from lightning_hotcompile.bench.workloads.attention import attention
from lightning_hotcompile.bench.workloads.surgical import rope, surgical
from lightning_hotcompile.bench.workloads.transformer import transformer
from lightning_hotcompile.bench.workloads.workload import Workload
from lightning_hotcompile.errors import ConfigError, near_names

WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "matmul_chain": operations.matmul_chain,
    "mlp": operations.mlp,
    "attention_block": operations.attention_block,
    "mixed": operations.mixed,
    "matmul_relu": operations.matmul_relu,
    "elementwise": operations.elementwise,
    "reduction": operations.reduction,
    "simple": operations.simple,
    "attention": attention,
    "transformer": transformer,
    "rope": rope,
    "surgical": surgical,
}

DETECTOR = "detector"
"""Measured in its own way: there is nothing to compile."""


def check(name: str, sizes: Mapping[str, Any]) -> None:
    """Refuse an unknown workload, and sizes that it does not take.

    Raises:
        ConfigError: the message lists what there is.
    """
    if name == DETECTOR:
        _check_detector(sizes)
        return
    if name not in WORKLOADS:
        hint = near_names(name, WORKLOADS)
        raise ConfigError(f"workload={name!r} is unknown: use {', '.join(WORKLOADS)}{hint}.")
    known = inspect.signature(WORKLOADS[name]).parameters
    for size in sizes:
        if size not in known:
            hint = near_names(size, known)
            raise ConfigError(f"{name} has no size {size!r}: it takes {', '.join(known)}{hint}.")


def _check_detector(sizes: Mapping[str, Any]) -> None:
    models = sizes.get("model")
    for model in models if isinstance(models, (list, tuple)) else [models]:
        if model not in CASES or len(sizes) != 1:
            raise ConfigError(
                f"{DETECTOR} has one size, model, which is one of {', '.join(CASES)}: {sizes!r}."
            )


def build(name: str, sizes: Mapping[str, Any], device: str) -> Workload:
    """The workload with the same weights and inputs each time."""
    check(name, sizes)
    make = WORKLOADS[name]
    given = dict(sizes)
    if "device" in inspect.signature(make).parameters:
        given["device"] = device
    torch.manual_seed(0)
    return make(**given).to(device)
