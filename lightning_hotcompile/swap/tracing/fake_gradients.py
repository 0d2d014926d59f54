"""The gradients of the fake tensors that Dynamo traces with."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from torch import Tensor
from torch._dynamo.variables import builder

from lightning_hotcompile.swap.tracing.overrides import Override

_with_gradients: deque[weakref.ref[Tensor]] = deque()


def noted_fake_gradients() -> list[Override]:
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
    while _with_gradients:
        if (fake := _with_gradients.popleft()()) is not None:
            fake.grad = None
