"""A tensor in words, so that another process can make one that looks like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_hotcompile.swap.prewarm.symbols import NotPortable

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Everything about a tensor but its data; strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool

    @classmethod
    def of(cls, name: str, value: Any) -> TensorSpec:
        """Describe a graph's input.

        Raises:
            NotPortable: it is no plain dense tensor.
        """
        if type(value) not in _PLAIN_TENSORS:
            raise NotPortable(
                f"input {name} is of type {type(value).__name__}: only plain tensors can be described"
            )
        if value.layout != torch.strided:
            raise NotPortable(f"input {name} has the layout {value.layout}: only dense tensors are described")
        if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
            raise NotPortable(f"input {name} has a symbolic shape {tuple(value.shape)}")
        return cls(
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            offset=int(value.storage_offset()),
            dtype=value.dtype,
            device=str(value.device),
            requires_grad=value.requires_grad,
            is_leaf=value.is_leaf,
            is_parameter=isinstance(value, nn.Parameter),
        )

    def empty(self, mode: FakeTensorMode, source: Any = None, context: Any = None) -> tuple[Tensor, Tensor]:
        """A tensor that looks like the described one, without memory, and what ``mode`` takes it for.

        AOTAutograd takes a fake input for a sign of dynamic shapes, which would be another key: so the
        outside is a real tensor, whose memory is given back as soon as ``mode`` has seen it. The mode
        knows it for as long as the second tensor lives. With a ``context`` some of its sizes are symbols.
        """
        value, memory = self.hollow()
        if context is None:
            fake = mode.from_tensor(value, static_shapes=True)
        else:
            fake = mode.from_tensor(value, source=source, symbolic_context=context)
        memory.untyped_storage().resize_(0)
        return value, fake

    def hollow(self) -> tuple[Tensor, Tensor]:
        """A tensor that looks like the described one, and the memory behind it, which may be given back."""
        size = 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(max(size, 1), dtype=self.dtype, device=self.device)
        value = memory.detach().as_strided(self.shape, self.stride, self.offset).detach()
        if self.is_parameter:
            value = nn.Parameter(value, requires_grad=self.requires_grad)
        else:
            value.requires_grad_(self.requires_grad)
        if not self.is_leaf:
            with torch.enable_grad():
                value = value.view_as(value)
        return value, memory


def refuse_shared_memory(tensors: Sequence[Any]) -> None:
    """Refuse tensors of which two have the same storage.

    Raises:
        NotPortable: two do.
    """
    # Compiled code depends on which inputs overlap: made for separate ones it would be found, and wrong.
    seen: dict[int, Tensor] = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address and seen.setdefault(address, tensor) is not tensor:
            raise NotPortable("two inputs of the graph share memory")
