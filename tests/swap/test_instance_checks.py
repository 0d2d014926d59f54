"""``isinstance`` by classes that answer it themselves."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_compiled_as_eager, assert_proven, hot
from tests.models import Small, fit, seeded


class _OfRank(type):
    rank = 0

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, Tensor):
            return instance.dim() == cls.rank
        return getattr(instance, "rank", 0) == cls.rank or instance == [cls.rank]


class _Inherits(_OfRank):
    """Has the answer of its base."""


class Vector(metaclass=_OfRank):
    rank = 1


class Matrix(metaclass=_OfRank):
    rank = 2


class Row(Matrix, metaclass=_Inherits):
    pass


class Ranked:
    """Any object, which is there before the step."""

    rank = 2


RANKED = Ranked()


class Old(Small):
    """Asks as programs from before torch 0.4 do, which knew tensors and variables."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if isinstance(out, Variable) else -out


class Checked(Small):
    """Asks a class of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if isinstance(out, (str, Matrix)) else -out


@pytest.mark.parametrize("model_class", [Old, Checked])
def test_a_step_takes_the_branch_that_it_takes_in_eager(model_class: type[Small]) -> None:
    assert_compiled_as_eager(model_class)


def test_a_variable_is_known_without_a_graph_break() -> None:
    callback = hot(fullgraph=True, **STEP)
    fit(seeded(Old), [callback])
    assert_proven(callback.report)


X = torch.rand(3)


@pytest.mark.parametrize(
    ("asked", "pieces"),
    [
        (lambda x: isinstance(x, Variable), 1),
        (lambda x: isinstance(x, (int, (str, Variable))), 1),
        (lambda x: isinstance(x, int | Variable), 1),
        (lambda x: isinstance(X, Variable), 1),
        (lambda x: isinstance(3.0, Variable), 1),
        (lambda x: isinstance(x.shape, Variable), 1),
        (lambda x: isinstance(x, Vector), 2),
        (lambda x: isinstance(x, (Vector, Row)), 2),
        (lambda x: isinstance([1], Vector), 2),
        (lambda x: isinstance([1], Matrix), 2),
        (lambda x: isinstance(RANKED, Matrix), 1),
        (lambda x: isinstance(RANKED, Row), 2),
        (lambda x: isinstance(RANKED, (int, Matrix)), 2),
        (lambda x: isinstance(x, Tensor), 1),
        (lambda x: isinstance(x, (nn.Parameter, numbers.Number)), 1),
        (lambda x: isinstance(x, torch.FloatTensor), 1),
        (lambda x: isinstance(x, Iterable), 1),
    ],
)
def test_the_answer_is_pythons(asked: Callable[[Tensor], bool], pieces: int) -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return y + 1 if asked(y) else y - 1

    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=False):
        torch.testing.assert_close(compiled.compile(X), function(X))
        torch.testing.assert_close(compiled.compile(X), function(X))
    assert backend.graphs == pieces
