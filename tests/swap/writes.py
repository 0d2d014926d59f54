"""Which numbers tensors are filled with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """Notes the numbers that tensors are filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.fill_.Scalar:
            self.numbers.append(args[1])
        return func(*args, **(kwargs or {}))
