"""``Variable(x)``, as old programs have it, is compiled; it is the tensor without its history."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_compiled_as_eager, assert_proven, hot
from tests.models import Small, fit, seeded


class Noisy(Small):
    """Noise as programs from before torch 0.4 have it, with a target that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x + Variable(torch.rand(x.shape)))
        return out * Variable(out, requires_grad=False).sigmoid()


def test_a_step_that_makes_them_is_one_graph_and_as_in_eager() -> None:
    assert_compiled_as_eager(Noisy)
    callback = hot(fullgraph=True, **STEP)
    fit(seeded(Noisy), [callback])
    assert_proven(callback.report)
    assert callback.report.graph_breaks == 0


def shares_its_numbers(x: Tensor) -> Tensor:
    doubled = 2 * x
    Variable(doubled).add_(1.0)
    return doubled.sin()


def has_no_history(x: Tensor) -> Tensor:
    y = Variable(x.sin())
    return x * y if isinstance(y, Variable) and not y.requires_grad else y


def of_a_parameter(x: Tensor) -> Tensor:
    y = Variable(WEIGHT)
    return y if isinstance(y, torch.nn.Parameter) else x * y


def asks_for_a_gradient(x: Tensor) -> Tensor:
    y = Variable(x.sin(), requires_grad=True)
    (gradient,) = torch.autograd.grad((y**2).sum(), y)
    return gradient * x


def has_nothing_in_it(x: Tensor) -> Tensor:
    return x + len(Variable())


WEIGHT = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("function", "is_one_graph"),
    [
        (shares_its_numbers, True),
        (has_no_history, True),
        (of_a_parameter, True),
        (asks_for_a_gradient, False),
        (has_nothing_in_it, False),
    ],
)
def test_one_is_as_in_eager(function: Callable[[Tensor], Tensor], is_one_graph: bool) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        for seed in range(3):
            x = torch.rand(3, generator=torch.Generator().manual_seed(seed))
            ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
            found, expected = compiled.compile(ours), function(plain)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(ours.grad, plain.grad)
    assert backend.graphs == 1 or not is_one_graph
