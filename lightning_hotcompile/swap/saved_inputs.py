"""Inputs that a compiled backward needs as they were, where eager's does not.

Compilers save inputs and compute once more what eager saves. A step that changes such an input after a graph
break, before the backward (the queue of MoCo: used as ``queue.clone()``, then written to), is right in eager,
and autograd raises for compiled code, when too much has run to be answered by eager. So the first run of a
graph is eager's where there are such inputs, and the backward tells whether they are still as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.dynamo import CompiledFn


def watch_until_backward(
    positions: Sequence[int],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    on_backward: Callable[[frozenset[int]], None],
) -> bool:
    """Say which inputs are no longer as they are now when a backward comes to one of the outputs.

    Values are compared: a write to ``tensor.data`` is counted by nobody, and eager is right then, too.

    Args:
        positions: of the inputs.
        inputs: of the run.
        outputs: of the run.
        on_backward: called once, with the positions of those that were changed.

    Returns:
        Whether any output has a backward.
    """
    waits = [output for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    if not waits:
        return False
    before = {i: (inputs[i], inputs[i].detach().clone()) for i in positions}
    is_done = False

    def look(_: Tensor) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            changed = frozenset(i for i, (tensor, value) in before.items() if not _is_still(tensor, value))
            before.clear()  # nothing of this step is kept
            on_backward(changed)

    for output in waits:
        output.register_hook(look)  # type: ignore[no-untyped-call]
    return True


def _is_still(tensor: Tensor, value: Tensor) -> bool:
    return tensor.shape == value.shape and torch.equal(tensor.detach(), value)


def with_copies(run: CompiledFn, positions: frozenset[int]) -> CompiledFn:
    """What gets copies of some inputs, which nobody else changes."""

    def with_copies_of_them(*args: Any) -> Any:
        return run(*(arg.clone() if i in positions else arg for i, arg in enumerate(args)))

    return with_copies_of_them


def can_be_copied(tensor: Tensor, outputs: Sequence[Any]) -> bool:
    """Whether a copy would do: it lies in memory as the tensor does, of which no output is a part."""
    memory = {o.untyped_storage().data_ptr() for o in outputs if _has_memory(o)}
    copy = torch.empty_like(tensor, device="meta")
    return copy.stride() == tensor.stride() and tensor.untyped_storage().data_ptr() not in memory


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
