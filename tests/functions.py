"""Functions that several tests compile as a target, or run as compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def scaled(loss: Tensor) -> Tensor:
    """Something to compile: the loss, a little changed."""
    return loss * 1.5 - loss.detach() * 0.5


class Scaler:
    """A class with a method to inherit."""

    def scale(self, x: Tensor) -> Tensor:
        """Twice as much."""
        return x * 2


def turned(x: Tensor) -> Tensor:
    """The same values, one column after the other in memory."""
    return x.t().contiguous().t()


class WrongGradient(torch.autograd.Function):
    """The value as it is, with a gradient that is 5% too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.05


def from_run(count: int, fault: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A backend whose code is eager's own until its run number ``count``.

    From then on it returns ``fault(graph, outputs)``, with the outputs of eager.
    """

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        runs = 0

        def code(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            outputs = graph.forward(*args)
            return outputs if runs < count else fault(graph, outputs)

        return code

    return backend


def tells_nothing(*_: Any) -> Any:
    """What torch answers to questions about the memory of an allocator that is not its own."""
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
