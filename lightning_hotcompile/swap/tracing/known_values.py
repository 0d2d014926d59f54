"""A shape that depends on values ends the graph, also where Dynamo happens to know the values.

It knows those of tensors that hold one number or none and are made in the step (``torch.tensor([])``), and
goes on with the shape that it finds. Inductor no longer knows them, and raises. Each adaptive solver of
torchdiffeq begins with such a ``unique``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """Dynamo does not know values where an operation makes a shape of them."""

    def call(prior: Any, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
            return prior(mode, func, types, args, kwargs)
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        known = [(tensor, tensor.constant) for tensor in found if tensor.constant is not None]
        for tensor, _ in known:
            tensor.constant = None
        try:
            return prior(mode, func, types, args, kwargs)
        finally:
            for tensor, value in known:
                tensor.constant = value

    return [Override(FakeTensorMode, "_dispatch_impl", call)]
