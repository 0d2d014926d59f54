"""The gradients of the fake tensors that Dynamo traces with."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch._dynamo.variables import builder

from lightning_hotcompile.swap.tracing.overrides import Override

T = TypeVar("T")

_with_gradients: deque[weakref.ref[Tensor]] = deque()


def overrides() -> list[Override]:
    """What Dynamo does otherwise: a fake tensor that has a gradient is noted, that of a broken-off trace too.

    It holds its gradient where Python's garbage collector does not see that, the gradient knows the mode of
    all fake tensors, and the mode knows the tensor: a ring that stays as long as the process lives (2.13).
    Parameters have gradients before a step as soon as one has run, so not where the first one is compiled.
    """

    def wrapped(prior: Any, *args: Any, **kwargs: Any) -> Any:
        fake = prior(*args, **kwargs)
        if isinstance(fake, Tensor) and fake.is_leaf and fake.grad is not None:
            _with_gradients.append(weakref.ref(fake))
        return fake

    return [Override(builder, "wrap_to_fake_tensor_and_record", wrapped)]


def forget_fake_gradients() -> None:
    """Open these rings; to be called while nothing is traced."""
    for reference in taken_from(_with_gradients):
        if (fake := reference()) is not None:
            fake.grad = None


def taken_from(queue: deque[T]) -> Iterator[T]:
    """All that is in it, which other threads may put into it, and take from it, at the same time."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()
