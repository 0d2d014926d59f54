"""Strides of dimensions of one element, which mean nothing to anybody but a compiler's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.optimizers.gradients import usual_strides, with_usual_strides
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.prewarm.described import describe


def odd(parameter: Tensor, dim: int = 2) -> Tensor:
    """A gradient of ones to ``n``, with a stride of 77 in a dimension of one element."""
    values = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
    strides = [77 if i == dim else s for i, s in enumerate(parameter.stride())]
    return torch.empty(0).set_(values.untyped_storage(), 0, parameter.shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides", "parameter_strides", "usual"),
    [
        ((4, 3, 1, 1), (3, 1, 3, 3), (3, 1, 1, 1), (3, 1, 1, 1)),
        ((4, 1, 3, 3), (9, 1, 3, 1), (9, 9, 3, 1), (9, 9, 3, 1)),
        ((4, 3), (1, 4), (3, 1), (1, 4)),  # a transposed gradient is another one
        ((4, 3, 1), (1, 4, 9), (3, 1, 1), (1, 4, 9)),
        ((), (), (), ()),
        ((1,), (5,), (1,), (1,)),
    ],
)
def test_only_what_means_nothing_is_the_parameters(
    shape: Any, strides: Any, parameter_strides: Any, usual: Any
) -> None:
    gradient = torch.empty_strided(shape, strides)
    assert usual_strides(gradient, torch.empty_strided(shape, parameter_strides)) == usual


def test_meanwhile_it_is_the_same_memory_and_afterwards_the_same_tensor() -> None:
    first, second, none = (
        nn.Parameter(torch.ones(3, 2, 1)),
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(2)),
    )
    first.grad, second.grad = odd(first), torch.ones(4)
    before = (first.grad, second.grad)
    with with_usual_strides([first, second, none]):
        assert first.grad.stride() == first.stride()
        assert first.grad.data_ptr() == before[0].data_ptr()
        assert torch.equal(first.grad, before[0])
        assert second.grad is before[1]
        first.grad.mul_(2)
    assert (first.grad is before[0], second.grad is before[1], none.grad) == (True, True, None)
    assert before[0].flatten().tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_a_gradient_that_was_replaced_meanwhile_stays_replaced() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, 1))
    parameter.grad = odd(parameter)
    with with_usual_strides([parameter]):
        parameter.grad = None
    assert parameter.grad is None


def test_sparse_gradients_and_those_of_other_kinds_are_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, 1))
    parameter.grad = before = torch.ones(3, 1).to_sparse()
    with with_usual_strides([parameter]):
        assert parameter.grad is before


def test_bits_that_the_memory_does_not_know_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = before = torch.tensor([1 + 2j]).conj().imag
    assert (before.is_neg(), before.stride()) == (True, (2,))
    with with_usual_strides([parameter]):
        assert parameter.grad is before


def test_a_compiled_step_is_one_graph_whatever_the_strides() -> None:
    """What it is compiled for is what is described to a child process; other strides find it again."""
    seen: list[list[tuple[int, ...]]] = []

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append([tuple(t.stride()) for t in inputs if isinstance(t, Tensor) and t.dim() == 3])
        return graph

    parameters = [nn.Parameter(torch.ones(3, 2, 1)) for _ in range(2)]
    eager = [nn.Parameter(torch.ones(3, 2, 1)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(eager, lr=0.1, momentum=0.9)
    gate = Gate(suppress_errors=False)
    region = Region(name="optimizer 0", kind="optimizer", members=("0",), class_name="SGD")
    swapped = SwappedOptimizer(region, gate, Witness(backend), optimizer=optimizer, dynamic=None)
    for lane, stride_of_one in ((None, False), (Lane.COMPILE, True), (Lane.REUSE, True), (Lane.REUSE, False)):
        for parameter, other in zip(parameters, eager, strict=True):
            parameter.grad = odd(parameter) if stride_of_one else odd(parameter).contiguous().clone()
            other.grad = parameter.grad.clone()
        given = [p.grad for p in parameters]
        if lane is not None:
            swapped.put(nn.Module())
            gate.open(lane)
        optimizer.step()
        gate.close()
        swapped.take_out()
        plain.step()
        assert all(p.grad is g for p, g in zip(parameters, given, strict=True))
        for parameter, other in zip(parameters, eager, strict=True):
            torch.testing.assert_close(parameter, other)
    assert len(seen) == 1
    assert set(seen[0]) == {(2, 1, 1)}
    assert swapped.calls == 3, "on the three lanes that are not eager"


def test_both_kinds_of_gradients_are_described_alike() -> None:
    words = []
    for stride_of_one in (False, True):
        parameter = nn.Parameter(torch.ones(3, 2, 1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.grad = odd(parameter) if stride_of_one else torch.ones(3, 2, 1)
        optimizer.step()
        words.append(json.loads(describe(optimizer)))
    assert words[0] == words[1]
