"""Inputs and outputs that a compiled backward needs as they were, where eager's does not.

Compilers save inputs and compute once more what eager saves, or save an output in place of two tensors. A
step that changes such a tensor before the backward (the queue of MoCo: used as ``queue.clone()``, then
written to after a graph break) is right in eager. For compiled code autograd raises, when too much has run to
be answered by eager. So the first run of a graph is eager's where there are such tensors, and the backward
tells whether they are still as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import untraced
from lightning_hotcompile.swap.dynamo import CompiledFn, version_of
from lightning_hotcompile.swap.parity.difference import of_output
from lightning_hotcompile.swap.process.free_memory import why_memory_is_short


def at_positions(
    positions: Iterable[int], inputs: Sequence[Any], outputs: Sequence[Any]
) -> dict[int, Tensor]:
    """The inputs and outputs of a run at these positions."""
    made = [output for output in outputs if isinstance(output, Tensor)]
    placed = {of_output(place): output for place, output in enumerate(made)}
    return {i: placed[i] if i < 0 else inputs[i] for i in positions}


def watch_until_backward(
    watched: Mapping[int, Tensor], outputs: Sequence[Any], on_backward: Callable[[frozenset[int]], None]
) -> bool:
    """Say which tensors are no longer as they are now when a backward comes to one of the outputs.

    Values are compared: a write to ``tensor.data`` is counted by nobody, and eager is right then, too. A
    write that is counted is a change whatever it wrote (``clamp_`` in range): autograd goes by the count.

    Args:
        watched: inputs and outputs of the run, by their positions.
        outputs: of the run.
        on_backward: called once, with the positions of those that were changed.

    Returns:
        Whether any output has a backward.
    """
    waits = [output for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    if not waits:
        return False
    # An output itself would keep the step that it comes from; what is detached counts the same writes.
    values = _copies(list(watched.values()))
    before = {
        i: (t.detach(), value, version_of(t)) for (i, t), value in zip(watched.items(), values, strict=True)
    }
    is_done = False

    @untraced
    def look(_: Tensor) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            changed = frozenset(i for i, known in before.items() if not _is_still(*known))
            before.clear()  # nothing of this step is kept
            on_backward(changed)

    for output in waits:
        output.register_hook(look)  # type: ignore[no-untyped-call]
    return True


def _copies(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Their values as they are; none where memory is short: then only writes that are counted are seen."""
    if why_memory_is_short(tensors, 1.0) is None:
        with contextlib.suppress(torch.OutOfMemoryError):
            return [tensor.detach().clone() for tensor in tensors]
    return [None] * len(tensors)


def _is_still(tensor: Tensor, value: Tensor | None, version: int | None) -> bool:
    if version_of(tensor) != version:
        return False
    try:
        return value is None or (tensor.shape == value.shape and _are_equal(tensor, value))
    except torch.OutOfMemoryError:
        return True  # as without memory for a copy


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether they hold the same numbers, NaN in the same places."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def with_copies(run: CompiledFn, positions: frozenset[int]) -> CompiledFn:
    """What gets copies of some inputs, which nobody else changes."""
    if not positions:
        return run

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
