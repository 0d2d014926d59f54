"""Marks that Dynamo leaves on the tensors of an optimizer which it compiles.

They say that the tensor never moves, so whatever is compiled later on makes it a part of its code: equal
blocks would need one compile each. And what is on a tensor of the state may go into checkpoints. Dynamo needs
them no longer once the optimizer is compiled: its guards are on the tensors themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

MARK = "_dynamo_static_input_type"


@contextlib.contextmanager
def static_marks_as_before(optimizer: Optimizer) -> Iterator[None]:
    """After it weights, gradients and state of an optimizer have the marks that they had."""
    before = {id(tensor): vars(tensor)[MARK] for tensor in _tensors(optimizer) if MARK in vars(tensor)}
    try:
        yield
    finally:
        for tensor in _tensors(optimizer):
            if id(tensor) in before:
                vars(tensor)[MARK] = before[id(tensor)]
            else:
                vars(tensor).pop(MARK, None)


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, Tensor))
