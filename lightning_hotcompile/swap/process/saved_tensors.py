"""Hooks on saved tensors, which may give a compiled backward other strides than its forward has saved.

``torch.autograd.graph.save_on_cpu(pin_memory=True)`` does: what it gives back is contiguous. Eager code takes
any strides. Compiled code is made for those that it has saved, and nothing could answer its error there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks_in_use() -> Hooks | None:
    """What packs and unpacks tensors that are saved now; takes about a tenth of a microsecond."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def strides_kept(hooks: Hooks) -> saved_tensors_hooks:
    """In place of these hooks: they pack and unpack, and each tensor gets its strides back."""
    pack, unpack = hooks

    def pack_with_strides(tensor: Tensor) -> tuple[Any, tuple[int, ...] | None]:
        strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None
        return pack(tensor), strides

    def unpack_with_strides(packed: tuple[Any, tuple[int, ...] | None]) -> Tensor:
        inner, strides = packed
        tensor = unpack(inner)
        return tensor if strides is None or tensor.stride() == strides else _laid_out(tensor, strides)

    return saved_tensors_hooks(not_of_the_user(pack_with_strides, hooks), unpack_with_strides)


def not_of_the_user(pack: Callable[[Tensor], Any], below: Hooks | None = None) -> Callable[[Tensor], Any]:
    """Mark what packs as torch, from 2.14 on, marks that of its checkpoints: it is no hook of the user's.

    Else a selective checkpoint warns of it, or has it pack what it keeps.

    Args:
        pack: is marked.
        below: the hooks that it stands for, ``None`` for none.
    """
    marked: Any = pack
    marked._checkpoint_internal, marked._user_hooks = True, below
    return pack


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same values with these strides; as it is if elements would lie on top of each other."""
    expanded = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    once = tensor[expanded]
    out = torch.empty_strided(once.shape, strides, dtype=tensor.dtype, device=tensor.device)
    with contextlib.suppress(RuntimeError):
        return out.copy_(once).expand(tensor.shape)
    return tensor
