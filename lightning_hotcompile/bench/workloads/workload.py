"""One workload: a module, its inputs, and the arms that run it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hotcompile.swap.optimizers.optimizer_step import bare_step
from lightning_hotcompile.swap.optimizers.optimizer_values import OptimizerValues

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function; each compiled function of an arm goes through the same one."""

MakeArm = Callable[[nn.Module, Compile], Callable[..., Tensor]]
"""Gives what an arm calls with the inputs. The module is shared by all arms: change a :func:`twin` of it."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

EAGER, COMPILED, COMPILED_OPTIMIZER = "eager", "compiled", "compiled+optimizer"


def whole(module: nn.Module, compile_function: Compile) -> Callable[..., Tensor]:
    """The module's call as one compiled function."""

    def call(module: nn.Module, *inputs: Tensor) -> Any:
        return module(*inputs)

    return functools.partial(compile_function(call), module)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run; all arms use the same weights, the same inputs and the same seed.

    If the module gives a scalar, that is the loss. Any other output goes backward with one fixed random
    cotangent.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    arms: Mapping[str, MakeArm] = field(default_factory=lambda: {COMPILED: whole})
    """The compiled arms by name; one called ``compiled`` also runs with a compiled optimizer."""

    others: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    """Eager functions of the same inputs to compare with, such as a fused operator."""

    training: bool = True
    """Forward and backward; without it the forward alone, under ``no_grad``."""

    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around each forward, outside of compiled code."""

    note: str = ""
    """What has to be said beside every number."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further columns: what the sizes mean."""

    def to(self, device: str) -> Workload:
        """The same on another device; its module and inputs are moved, and keep what needs a gradient."""
        inputs = tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in self.inputs)
        return Workload(**{**vars(self), "module": self.module.to(device), "inputs": inputs})


def twin(module: nn.Module) -> nn.Module:
    """A copy that can be changed and shares parameters and buffers with the original."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo=shared)


def compiled_step(optimizer: Optimizer, compile_function: Compile) -> Callable[[], None]:
    """The optimizer's step as one compiled function; rates are tensors and counts on the device meanwhile."""
    values, step = OptimizerValues(optimizer), bare_step(type(optimizer))

    def optimizer_step(optimizer: Optimizer) -> None:
        with torch.no_grad():
            step(optimizer)

    compiled = compile_function(optimizer_step)

    def run() -> None:
        with values.for_compiled():
            compiled(optimizer)

    return run


def generator(seed: int = 1) -> torch.Generator:
    """For inputs: the same numbers in each process and for each device."""
    return torch.Generator().manual_seed(seed)
