"""The weights of a teacher follow those of a student, by a momentum that a schedule sets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import TORCH, compiling_allowed
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded

Weights = list[Tensor]


def scaled(teacher: Weights, student: Weights, momentum: float) -> None:
    for average, weight in zip(teacher, student, strict=True):
        average.mul_(momentum).add_(weight, alpha=1 - momentum)


def subtracted(teacher: Weights, student: Weights, momentum: float) -> None:
    for average, weight in zip(teacher, student, strict=True):
        average.copy_(torch.sub(average, average - weight, alpha=1 - momentum))


def interpolated(teacher: Weights, student: Weights, momentum: float) -> None:
    for average, weight in zip(teacher, student, strict=True):
        average.lerp_(weight, 1 - momentum)


def interpolated_anew(teacher: Weights, student: Weights, momentum: float) -> None:
    for average, weight in zip(teacher, student, strict=True):
        average.copy_(torch.lerp(weight, average, weight=momentum))


def listed(teacher: Weights, student: Weights, momentum: float) -> None:
    torch._foreach_mul_(teacher, momentum)
    torch._foreach_add_(teacher, student, alpha=1 - momentum)


def listed_anew(teacher: Weights, student: Weights, momentum: float) -> None:
    kept = torch._foreach_mul(teacher, momentum)
    torch._foreach_copy_(teacher, torch._foreach_add(kept, student, alpha=1 - momentum))


def listed_interpolated(teacher: Weights, student: Weights, momentum: float) -> None:
    torch._foreach_lerp_(teacher, student, 1 - momentum)


_LATER = pytest.mark.skipif(TORCH < (2, 13), reason="a constant with torch 2.11: the step stays eager")

UPDATES = [
    scaled,
    pytest.param(subtracted, marks=_LATER),
    pytest.param(interpolated, marks=_LATER),
    interpolated_anew,
    listed,
    listed_anew,
    pytest.param(listed_interpolated, marks=_LATER),
]


class Teaches(Small):
    """A teacher whose momentum is another one in each step."""

    update: Callable[[Weights, Weights, float], None]
    momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.momentum = 1 - 0.1 * math.cos(0.03 * self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            type(self).update(list(self.teacher.parameters()), list(self.blocks.parameters()), self.momentum)
        x = self.inp(batch[0])
        return self.loss(batch) + F.mse_loss(self.blocks[0](x), self.teacher[0](x).detach())


def assert_compiled_once(update: Callable[[Weights, Weights, float], None], **options: Any) -> None:
    kind = type("Case", (Teaches,), {"update": staticmethod(update)})
    plain, model = seeded(kind), seeded(kind)
    callback = hot(**{**STEP, **options})
    fit(plain)
    fit(model, [callback])
    report = callback.report
    assert_proven(report)
    assert report.phase == "steady", report.to_text()
    assert report.recompiles == 1, "once it has changed"
    assert report.graph_breaks == 0
    assert_same(plain, model)


@pytest.mark.parametrize("update", UPDATES)
def test_a_momentum_that_changes_is_no_constant(update: Callable[[Weights, Weights, float], None]) -> None:
    assert_compiled_once(update)


KINDS = [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float64, torch.int64)]


@pytest.mark.parametrize(("longer", "shorter"), KINDS)
def test_a_shorter_kind_is_not_rounded_once_more(longer: torch.dtype, shorter: torch.dtype) -> None:
    """Such a momentum stays a constant of the code, as torch has it."""

    def follow(average: Tensor, weight: Tensor, momentum: float) -> Tensor:
        return average.add(weight, alpha=1 - momentum)

    compiled = CompiledFunction(
        follow, resolve_backend("aot_eager", None, None), dynamic=None, fullgraph=True
    )
    average, weight = torch.linspace(-1, 1, 7, dtype=longer), torch.arange(7).mul(1001 / 3).to(shorter)
    for momentum in (0.9, 0.91, 0.937):
        with compiling_allowed(suppress_errors=False):
            found = compiled.compile(average, weight, momentum)
        assert torch.equal(found, follow(average, weight, momentum))


@pytest.mark.slow
@pytest.mark.parametrize("update", [scaled, pytest.param(interpolated, marks=_LATER), listed])
def test_code_of_inductor_goes_with_it(update: Callable[[Weights, Weights, float], None]) -> None:
    assert_compiled_once(update, backend="inductor")
