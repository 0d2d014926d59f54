"""How far two runs of a graph are apart, and whether that is rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.dynamo import agree_within_tolerance
from lightning_hotcompile.swap.parity.proportion import are_left_of_zeros, largest_share
from lightning_hotcompile.swap.parity.reach import Reach
from lightning_hotcompile.swap.parity.tensors import AT_A_TIME, HAVE_64_BIT, dense, odd_alike

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Relative and absolute tolerance by dtype; those of PyTorch's own training benchmark for fp32 and below."""

_KINDS = ("tensors", "gradients", "inputs")


@dataclass(frozen=True)
class Run:
    """Outputs, gradients and (afterwards) inputs of one run of a graph.

    ``changed`` are the positions of the inputs that the run changed in place, ``changed_held`` those of
    the tensors that the graph holds; ``random`` tells whether it drew random numbers, ``on_cpu`` whether all
    of them came from the CPU's generator, and ``drawn`` is the state of that after the forward. ``saved`` are
    the positions of the inputs that the backward needs, and of the outputs as of :func:`of_output`. Those in
    ``sharing`` have gradients that share the memory of an earlier one; ``reach`` is that of
    :func:`~lightning_hotcompile.swap.parity.reach.reach_of`.
    """

    tensors: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    changed: tuple[int, ...] = ()
    changed_held: tuple[int, ...] = ()
    random: bool = False
    on_cpu: bool = False
    drawn: Tensor | None = None
    saved: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    """Positions of the inputs that lie in other memory afterwards."""

    late: tuple[int, ...] = ()
    """Of those that it changed: which ones it changed after it had saved the last tensor."""

    sharing: tuple[int, ...] = ()
    reach: Reach = field(default_factory=dict)
    apart: tuple[int, ...] = ()
    """Positions of the inputs that want a gradient and that no backward comes to."""

    by_compiler: bool = False
    """Whether it had a backward of AOTAutograd's."""

    several: bool = False
    """Whether more than one output has a gradient."""

    movement: tuple[float, ...] | None = None
    """How far the run has moved each of ``inputs``; known of eager runs only."""

    held: int = 0
    """How many of ``inputs``, the last ones, are tensors that the graph holds: an optimizer's."""


def of_output(place: int) -> int:
    """The position of an output, by its place among the tensors of the outputs: inputs have 0, 1, 2, ..."""
    return -1 - place


def flat(outputs: Any) -> Sequence[Any]:
    """The outputs of a captured graph, which are not nested, as a sequence."""
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def pairs(a: Run, b: Run) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """What corresponds to each other in two runs."""
    for kind in _KINDS:
        both = zip(getattr(a, kind), getattr(b, kind), strict=False)
        yield from ((None if x is None else dense(x), None if y is None else dense(y)) for x, y in both)


def same_kinds(a: Run, b: Run) -> bool:
    """Whether there are as many outputs and gradients, of the same shapes."""
    return (
        len(a.tensors) == len(b.tensors)
        and len(a.gradients) == len(b.gradients)
        and all(
            (x is None) == (y is None) and (x is None or y is None or x.shape == y.shape)
            for x, y in pairs(a, b)
        )
    )


def same_dtypes(a: Run, b: Run) -> bool:
    """Whether their numbers are of the same types: ``~`` of ``uint8`` is not that of ``bool``."""
    return all(x.dtype is y.dtype for x, y in pairs(a, b) if x is not None and y is not None)


def largest_difference(a: Run, b: Run) -> float:
    """Largest absolute difference; infinite where one has NaN and the other has not."""
    return max((_gap(x, y) for x, y in pairs(a, b) if x is not None and y is not None), default=0.0)


def _gap(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape or not x.numel():
        return 0.0
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0 if torch.equal(x, y) else float("inf")
    parts = zip(torch.split(x.reshape(-1), AT_A_TIME), torch.split(y.reshape(-1), AT_A_TIME), strict=True)
    return float(torch.stack([_gap_of_part(a, b) for a, b in parts]).max())


def _gap_of_part(x: Tensor, y: Tensor) -> Tensor:
    if x.device.type not in HAVE_64_BIT:
        x, y = x.cpu(), y.cpu()
    gap = (x.to(torch.complex128 if x.is_complex() else torch.float64) - y).abs()
    both_odd = ~x.isfinite() & ~y.isfinite() & ((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(both_odd, torch.zeros_like(gap), gap)
    return torch.nan_to_num(gap, nan=float("inf"), posinf=float("inf")).max()


def has_zero_gradients(run: Run) -> bool:
    """Whether all of them are zeros, if there are any."""
    return not any(bool(dense(g).any()) for g in run.gradients if g is not None)


def _by_dtype(tensor: Tensor) -> float:
    return TOLERANCE.get(tensor.dtype, TOLERANCE[torch.float32])


def all_agree(eager: Run, compiled: Run, reference: Callable[[], Run | None]) -> bool:
    """Whether each tensor is close, by numbers and in proportion, or as near to a 64-bit run as eager is.

    The 64-bit ``reference`` is asked for only where something is not close: it takes twice the memory. Where
    there is none, as in a graph that pins its dtypes, 32-bit results under autocast are held to the tolerance
    of the dtype that they were computed in, as PyTorch's own training benchmark does.

    Raises:
        torch.OutOfMemoryError: there is no memory for it, and what differs may be rounding.
    """
    if _each_agrees(eager, compiled, eager) and not out_of_proportion(eager, compiled, strict=True):
        return True
    try:
        wide = reference()
    except torch.OutOfMemoryError:
        if math.isfinite(largest_difference(eager, compiled)) and not out_of_proportion(eager, compiled):
            raise
        return False
    if wide is None:
        by_numbers = _each_agrees(eager, compiled, eager, tolerance_of=_under_autocast)
        return by_numbers and not out_of_proportion(eager, compiled)
    known = same_kinds(eager, wide) and _each_agrees(eager, compiled, wide)
    return known and not out_of_proportion(eager, compiled, wide)


def out_of_proportion(eager: Run, compiled: Run, wide: Run | None = None, *, strict: bool = False) -> float:
    """The largest difference as a share of the tensor that it is in; 0 if all are rounding.

    Of an input it is the share of how far the run has moved it.
    """
    shares = [
        largest_share(
            getattr(eager, kind),
            getattr(compiled, kind),
            None if wide is None else getattr(wide, kind),
            strict=strict,
            unit=1.0 if kind == "tensors" else 0.0,
        )
        for kind in ("tensors", "gradients")
    ]
    if eager.movement is not None:
        for part, may_cancel in _inputs_and_held(eager):
            exact = None if wide is None else wide.inputs[part]
            one, other, moved = eager.inputs[part], compiled.inputs[part], eager.movement[part]
            shares.append(largest_share(one, other, exact, moved=moved, strict=strict, may_cancel=may_cancel))
    return max(shares)


def _inputs_and_held(run: Run) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """Both parts of ``inputs``, and whether what moves little there may be rounding.

    Statistics of what has mean zero are that, an update of weights and its state are not: beside a count of
    steps, which moves by 1, all of them are small.
    """
    first_held = len(run.inputs) - run.held
    return (slice(0, first_held), True), (slice(first_held, None), False)


def _each_agrees(
    eager: Run, compiled: Run, reference: Run, tolerance_of: Callable[[Tensor], float] = _by_dtype
) -> bool:
    kinds = [kind for kind in _KINDS for _ in getattr(eager, kind)]
    apart: list[tuple[Tensor, Tensor]] = []
    for kind, (x, y), (_, wide) in zip(kinds, pairs(eager, compiled), pairs(eager, reference), strict=True):
        if x is None or y is None or _agree(x, y, x if wide is None else wide, tolerance_of(x)):
            continue
        if kind != "gradients":
            return False
        apart.append((x, y))
    return not apart or are_left_of_zeros(apart, eager.gradients)


def is_close(x: Tensor, y: Tensor, moved: float | None = None) -> bool:
    """Whether two tensors agree by themselves, by numbers and in proportion.

    ``moved`` is how far eager has moved the first one, if it is an input.
    """
    moves = None if moved is None else [moved]
    return _agree(x, y, x, _by_dtype(x)) and not largest_share([x], [y], moved=moves, strict=True)


def _agree(x: Tensor, y: Tensor, wide: Tensor, tolerance: float) -> bool:
    """PyTorch's rule for numbers, without the places of which it makes NaN; anything else has to be equal."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    places = odd_alike(x, y)
    if places is not None:
        x, y, wide = (tensor.masked_fill(places, 0) for tensor in (x, y, wide))
    return agree_within_tolerance(x, y, wide, tolerance)


def _under_autocast(tensor: Tensor) -> float:
    device = tensor.device.type
    known = tensor.dtype is torch.float32 and torch.amp.is_autocast_available(device)
    if not (known and torch.is_autocast_enabled(device)):
        return _by_dtype(tensor)
    return max(_by_dtype(tensor), TOLERANCE.get(torch.get_autocast_dtype(device), 0.0))
