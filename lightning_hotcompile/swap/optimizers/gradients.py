"""Gradients as every way to make them agrees on: the strides of a dimension of one element mean nothing.

The gradient of a 1x1 or a depthwise convolution has other such strides from compiled code than from eager
code. Compiled code takes either, but the compiler's cache tells them apart: an optimizer that was compiled
ahead, when gradients were eager ones, would be compiled once more at the flip.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def usual_strides(gradient: Tensor, parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides where the gradient's differ in dimensions of one element only, else its own."""
    shape, ours, theirs = tuple(gradient.shape), gradient.stride(), parameter.stride()
    alike = shape == tuple(parameter.shape) and all(
        a == b for size, a, b in zip(shape, ours, theirs, strict=True) if size > 1
    )
    return tuple(theirs) if alike else tuple(ours)


@contextlib.contextmanager
def with_usual_strides(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Meanwhile gradients have their usual strides, on the same memory; then they are what they were."""
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            continue
        if gradient.is_conj() or gradient.is_neg():
            continue  # bits of the tensor, which its memory does not know
        strides = usual_strides(gradient, parameter)
        if strides != gradient.stride():
            usual = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
            with torch.no_grad():
                usual.set_(gradient.untyped_storage(), gradient.storage_offset(), gradient.shape, strides)
            parameter.grad = usual
            held.append((parameter, gradient, usual))
    try:
        yield
    finally:
        for parameter, gradient, usual in held:
            if parameter.grad is usual:
                parameter.grad = gradient
