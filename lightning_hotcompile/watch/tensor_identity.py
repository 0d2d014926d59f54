"""Which tensors of a step are the same one, without keeping any of them alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Storage number, offset, shape, strides; then the dtype if the storage is new, and the device type if nobody
# was seen to make it.
Place = tuple[Any, ...]

storage_number: Callable[[Tensor], int] = vars(torch._C)["_storage_id"]
_weak_tensor: Callable[[Tensor], object] = vars(torch._C)["_WeakTensorRef"]
_free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref


class SeenStorages:
    """The storages that were seen, each under a number that no other one can get meanwhile.

    A weak reference keeps a storage's small header, and so its address, but not its data: memory is freed
    as it would be without us, and a tensor in the memory of a dead one is still told from it. Neither ``id``
    nor ``data_ptr`` could do that.
    """

    def __init__(self) -> None:
        self.has_views: dict[int, bool] = {}
        """By storage number: whether several tensors lie on it. If not, the number names the tensor."""
        self._storages: list[Any] = []
        self._tensors: list[object] = []

    def keep(self, number: int, tensor: Tensor) -> None:
        """Note a storage that was not seen before."""
        self.has_views[number] = False
        self._storages.append(tensor.untyped_storage()._weak_ref())

    def read(self, tensor: Tensor) -> int | Place:
        """Where a tensor is that an operation reads: for a storage without views its number alone."""
        number, *geometry = self._place_of_any(tensor)
        has_views = self.has_views.get(number)
        if has_views is None:
            self._keep_any(number, tensor)
            return (number, *geometry, tensor.dtype, tensor.device.type)
        return (number, *geometry) if has_views else number

    def made(self, tensor: Tensor) -> Place:
        """Where a tensor is that an operation has just made."""
        number, *geometry = self._place_of_any(tensor)
        if number not in self.has_views:
            self._keep_any(number, tensor)
            return (number, *geometry, tensor.dtype)
        self.has_views[number] = True
        return (number, *geometry)

    def _place_of_any(self, tensor: Tensor) -> Place:
        try:
            number = storage_number(tensor)
        except RuntimeError:
            # Sparse and opaque tensors have no storage: the address of their own header names them.
            number = tensor._cdata
        try:
            # A symbolic size (of a nested tensor) differs from step to step, and would keep tensors alive.
            shape = tuple(size if size.__class__ is int else -1 for size in tensor.shape)
            strides = tuple(size if size.__class__ is int else -1 for size in tensor.stride())
            return (number, int(tensor.storage_offset()), shape, strides)
        except RuntimeError:
            return (number, 0, (), ())

    def _keep_any(self, number: int, tensor: Tensor) -> None:
        if number == tensor._cdata:
            self._tensors.append(_weak_tensor(tensor))
            self.has_views[number] = False
        else:
            self.keep(number, tensor)

    def release(self) -> None:
        """Forget all storages and give their headers back."""
        self.has_views.clear()
        self._tensors.clear()
        while self._storages:
            _free_weak_storage(self._storages.pop())

    def __del__(self) -> None:
        self.release()
