"""Operations that take a plain number: a momentum, a limit or a filling that a schedule sets."""

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


def assert_compiled_once(kind: type[Small], **options: Any) -> None:
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


def teaches(update: Callable[[Weights, Weights, float], None]) -> type[Teaches]:
    return type("Case", (Teaches,), {"update": staticmethod(update)})


@pytest.mark.parametrize("update", UPDATES)
def test_a_momentum_that_changes_is_no_constant(update: Callable[[Weights, Weights, float], None]) -> None:
    assert_compiled_once(teaches(update))


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


USES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": lambda x, level: x.clamp(1 - level, 1 + level),
    "clamp by name": lambda x, level: torch.clamp(x, max=level),
    "clamp with a constant": lambda x, level: x.clip(0.0, level),
    "clamp in place": lambda x, level: x.clone().clamp_(-level, level),
    "clamp_min": lambda x, level: torch.clamp_min(x, level),
    "clamp_max": lambda x, level: x.clamp_max(level),
    "masked_fill": lambda x, level: x.masked_fill(x > 0, level),
    "masked_fill in place": lambda x, level: x.clone().masked_fill_(x > 0, level),
    "where": lambda x, level: torch.where(x > 0, x, level),
    "where not": lambda x, level: torch.where(x > 0, level, x),
    "where of a tensor": lambda x, level: x.where(x > 0, level),
    "fill_": lambda x, level: x * torch.empty_like(x).fill_(level),
    "full_like": lambda x, level: x * torch.full_like(x, level),
    "full": lambda x, level: x * torch.full((len(x), 1), level),
    "full with a kind": lambda x, level: x * torch.full((1,), level, dtype=torch.float64, device=x.device),
    "new_full": lambda x, level: x * x.new_full((1,), level),
    "new_tensor": lambda x, level: x * x.new_tensor(level),
    "tensor": lambda x, level: x * torch.tensor(level),
    "as_tensor": lambda x, level: x * torch.as_tensor(level),
    "tensor with a kind": lambda x, level: x * torch.tensor(level, dtype=x.dtype, device=x.device),
    "pow": lambda x, level: torch.pow(x.abs() + 1, level),
    "pow of a tensor": lambda x, level: (x.abs() + 1).pow(level),
    "an exponent": lambda x, level: (x.abs() + 1) ** level,
    "a base": lambda x, level: level**x,
    "a power of numbers": lambda x, level: x * level**2.5 * 1.5**level,
}


class Follows(Small):
    """A level that is another one in each step goes into an operation that takes plain numbers."""

    use: Callable[[Tensor, float], Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + type(self).use(self.inp(batch[0]), 2 * self.level).square().mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.level = 0.2 + 0.1 * math.cos(0.03 * self.global_step)


def follows(name: str) -> type[Follows]:
    return type("Case", (Follows,), {"use": staticmethod(USES[name])})


@_LATER
@pytest.mark.parametrize("name", USES)
def test_a_level_that_changes_is_no_constant(name: str) -> None:
    assert_compiled_once(follows(name))


@_LATER
@pytest.mark.slow
@pytest.mark.parametrize("name", ["clamp", "masked_fill", "where", "full", "tensor"])
def test_code_of_inductor_goes_with_a_level(name: str) -> None:
    assert_compiled_once(follows(name), backend="inductor")


def test_what_is_at_the_limit_has_the_gradient_of_eager() -> None:
    def limited(x: Tensor, level: float) -> Tensor:
        return x.clamp(-level, level) + x.clamp_min(level) + torch.clamp(x, max=level)

    compiled = CompiledFunction(
        limited, resolve_backend("aot_eager", None, None), dynamic=None, fullgraph=True
    )
    for level in (0.25, 0.5, 0.75):
        x = torch.tensor([-1.0, -level, 0.0, level, math.nan, math.inf], requires_grad=True)
        other = x.detach().clone().requires_grad_()
        with compiling_allowed(suppress_errors=False):
            found = compiled.compile(x, level)
        expected = limited(other, level)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, other.grad)


@pytest.mark.slow
@pytest.mark.parametrize("update", [scaled, pytest.param(interpolated, marks=_LATER), listed])
def test_code_of_inductor_goes_with_it(update: Callable[[Weights, Weights, float], None]) -> None:
    assert_compiled_once(teaches(update), backend="inductor")
