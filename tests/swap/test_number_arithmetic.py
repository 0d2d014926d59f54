"""Arithmetic of numbers that change, and powers of negative ones: as Python has it, its errors included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graphs.witness import Witness

Function = Callable[[Tensor, Any], Tensor]

POWERS_OF_TENSORS: dict[str, Function] = {
    "whole numbers": lambda x, n: (-1) ** torch.arange(4) * x,
    "floats": lambda x, n: (-2.0) ** x.detach().round() * x,
    "of an attribute": lambda x, n: signs.sign ** x.detach().round() * x,
    "the function": lambda x, n: pow(-1, torch.arange(4)) * x,
}

FLOATS: dict[str, tuple[Function, tuple[float, ...]]] = {
    "whole quotient": (lambda x, f: x * (f // 0.1), (0.3, 0.55, 1.0, 0.7, -0.3)),
    "quotient of one": (lambda x, f: x * (1 // f), (0.3, 0.55, 0.1, 0.2, 0.0)),
    "remainder": (lambda x, f: x * (f % 0.1), (0.3, 0.55, 1.0, 0.7, -0.3)),
    "both": (lambda x, f: x * divmod(f, 0.1)[0], (0.3, 0.55, 1.0, 0.7)),
    "one by it": (lambda x, f: x * (1.0 / f), (0.5, 0.25, 0.125, 0.0, -0.0, 0.5)),
    "negative power": (lambda x, f: x * f**-0.5, (0.5, 0.25, 0.125, 0.0)),
    "root": (lambda x, f: x * math.sqrt(f), (0.5, 0.25, 0.0, -0.3, 0.5)),
    "arc cosine": (lambda x, f: x * math.acos(f), (0.5, 0.25, 1.0, -1.0, 1.5)),
    "difference": (lambda x, f: x * (f - f + 1), (0.5, 0.25, math.inf, math.nan, 0.5)),
    "whole part": (lambda x, f: x * int(f * 5), (0.5, 0.25, 0.9, math.inf)),
    "sine": (lambda x, f: x * math.sin(f), (0.5, 0.25, 0.9, math.inf)),
}

INTEGERS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "sign in turns": (lambda x, n: x * (-1) ** n, (3, 4, 5, 6)),
    "power of a negative number": (lambda x, n: x * (-2) ** n, (3, 4, 5, 6)),
    "power of a negative float": (lambda x, n: x * (-0.5) ** n, (3, 4, 5, 6)),
    "negative power": (lambda x, n: x * n**-1, (3, 4, 5, 0, 2)),
    "root": (lambda x, n: x * math.sqrt(n), (3, 4, 5, -1, 2)),
    "tenths": (lambda x, n: x * (n * 0.1 // 0.1), (3, 4, 5, 7)),
    "quotient": (lambda x, n: x * (1 / n), (3, 4, 5, 0)),
    "whole quotient": (lambda x, n: x * (7 // n), (3, 4, 5, 0)),
    "remainder": (lambda x, n: x * (7 % n), (3, 4, 5, 0)),
    "square": (lambda x, n: x * n**2 * 2**n, (3, 4, 5, 0)),
}


class Signs:
    """Something with a number."""

    sign = -1


signs = Signs()


def outcome(call: Function, number: Any) -> Any:
    """The result and the gradient, or the kind of the error."""
    x = torch.linspace(-1.0, 2.0, 4, requires_grad=True)
    try:
        with compiling_allowed(suppress_errors=True):
            out = call(x, number)
    except (ArithmeticError, ValueError) as error:
        return type(error)
    out.sum().backward()
    return torch.stack([out.detach(), x.grad if x.grad is not None else x.detach()])


def check(function: Function, numbers: tuple[Any, ...], backend: str) -> int:
    """Compare in a row of calls; returns how many graphs ran."""
    witness = Witness(backend)
    compiled = CompiledFunction(function, witness.backend_for("region"), dynamic=None, fullgraph=False)
    for number in numbers:
        expected, found = outcome(function, number), outcome(compiled.compile, number)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert found is expected, number
    return witness.watch.total_runs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", POWERS_OF_TENSORS.values(), ids=POWERS_OF_TENSORS)
def test_a_negative_number_to_the_power_of_a_tensor(function: Function, backend: str) -> None:
    assert check(function, (1, 1), backend) == 2


def test_torch_by_itself_forgets_the_brackets() -> None:
    """Where it no longer does this override is not needed."""

    def power(x: Tensor) -> Tensor:
        return (-1) ** x

    found = torch.compile(power, backend="eager")(torch.arange(4))
    assert found.tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("function", "numbers"), FLOATS.values(), ids=FLOATS)
def test_floats_that_change(function: Function, numbers: tuple[float, ...], backend: str) -> None:
    assert check(function, numbers, backend), "something runs compiled"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("function", "numbers"), INTEGERS.values(), ids=INTEGERS)
def test_whole_numbers_that_change(function: Function, numbers: tuple[int, ...], backend: str) -> None:
    assert check(function, numbers, backend), "something runs compiled"


def test_an_annealed_divisor_is_one_graph() -> None:
    """A guard is no graph break."""
    numbers = (0.5, 0.25, 0.125, 0.75, 0.3)

    def function(x: Tensor, f: float) -> Tensor:
        return x / f * (1.0 / f) * math.sqrt(f) * f**-0.5

    assert check(function, numbers, "aot_eager") == len(numbers)
