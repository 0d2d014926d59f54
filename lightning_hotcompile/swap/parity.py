"""Is compiled code right: one captured graph, run eagerly and compiled on the same real inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hotcompile.swap.dynamo import agree_within_tolerance

_log = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Relative and absolute tolerance by dtype; those of PyTorch's own training benchmark for fp32 and below."""

NOISE_FACTOR = 3.0
"""A graph with random numbers may differ from eager by so many times what two eager runs differ."""

_SEEDS = (20_011, 20_021)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What the comparison of one graph said.

    ``error`` is the largest absolute difference of an output, a gradient or a mutated input.
    ``stochastic`` graphs are held against the noise between two eager runs with other seeds.
    """

    agrees: bool | None
    """``None``: not compared, see ``reason``."""

    error: float | None = None
    stochastic: bool = False
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether it was compared and does not agree."""
        return self.agrees is False


@dataclass(frozen=True)
class _Run:
    """Outputs, gradients and (afterwards) inputs of one run: float tensors to compare, and the rest."""

    tensors: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]


def compare(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Sequence[Any],
    held: Sequence[Tensor] = (),
) -> Parity:
    """Run both on clones of the same inputs, forward and backward, and compare.

    The rule is that of PyTorch's benchmarks (``torch._dynamo.utils.same``): close within a tolerance
    by dtype, else as near to a 64-bit run as eager is. Gradients are taken with one random cotangent.
    ``held`` are tensors that both hold by themselves and may change (an optimizer's parameters and
    state). Afterwards inputs, held tensors, gradients and the random state are as before; no user code
    runs, since a captured graph is tensor code only. Needs memory for two more sets of inputs and outputs.
    What cannot be compared for a reason that is not foreseen counts as wrong: in doubt, eager.
    """
    try:
        _refuse_what_cannot_be_cloned([*inputs, *held])
        with _random_state_kept([*inputs, *held]):
            return _Comparison(inputs, held).between(eager, compiled)
    except torch.OutOfMemoryError as error:
        return Parity(agrees=None, reason=f"not compared for lack of memory: {str(error).splitlines()[0]}")
    except _NotComparable as error:
        return Parity(agrees=None, reason=str(error))
    except Exception as error:  # noqa: BLE001
        _log.debug("the comparison failed", exc_info=True)
        return Parity(agrees=False, reason=f"could not be compared: {type(error).__name__}: {error}")


class _NotComparable(Exception):
    """The inputs are of a kind that cannot be cloned faithfully."""


def _refuse_what_cannot_be_cloned(inputs: Sequence[Any]) -> None:
    for value in inputs:
        if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise _NotComparable(f"not compared: an input is a {type(value).__name__}")
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            raise _NotComparable(f"not compared: an input has layout {value.layout}")
    _refuse_if_memory_is_short(inputs)


def _refuse_if_memory_is_short(inputs: Sequence[Any]) -> None:
    on_gpu = [t for t in inputs if isinstance(t, Tensor) and t.is_cuda]
    if not on_gpu:
        return
    needed = 3 * sum(t.untyped_storage().nbytes() for t in on_gpu)
    free, _ = torch.cuda.mem_get_info(on_gpu[0].device)
    free += torch.cuda.memory_reserved(on_gpu[0].device) - torch.cuda.memory_allocated(on_gpu[0].device)
    if needed > free:
        raise _NotComparable(
            f"not compared for lack of memory: {needed >> 20} MB are needed, {free >> 20} MB are free"
        )


@contextmanager
def _random_state_kept(inputs: Sequence[Any]) -> Iterator[None]:
    devices = sorted({t.device.index or 0 for t in inputs if isinstance(t, Tensor) and t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        yield


class _Comparison:
    """Runs functions on the same inputs, one after the other, each on a fresh copy."""

    def __init__(self, inputs: Sequence[Any], held: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self._held = held

    def between(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Parity:
        """Compare two functions."""
        first, second = (self._run(eager, seed) for seed in _SEEDS)
        noise = _largest_difference(first, second)
        try:
            result = self._run(compiled, _SEEDS[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, this code must not be used
            _log.debug("compiled code raised", exc_info=True)
            return Parity(agrees=False, reason=f"compiled code raised {type(error).__name__}: {error}")
        difference = _largest_difference(first, result)
        if noise > 0:
            agrees = _same_kinds(first, result) and difference <= NOISE_FACTOR * noise
            reason = "" if agrees else f"differs by {difference:.3g}, two eager runs by {noise:.3g}"
            return Parity(agrees=agrees, error=difference, stochastic=True, reason=reason)
        agrees = _same_kinds(first, result) and _all_agree(first, result, self._run_in_64_bit(eager))
        reason = "" if agrees else f"differs from eager by up to {difference:.3g}"
        return Parity(agrees=agrees, error=difference, reason=reason)

    def _run(self, function: Callable[..., Any], seed: int, widened: bool = False) -> _Run:
        torch.manual_seed(seed)
        clones = _widened(self._inputs) if widened else clone_inputs(self._inputs)
        held = [] if widened else list(self._held)
        with _values_kept(held):
            outputs = [t for t in tree_leaves(function(*clones)) if isinstance(t, Tensor)]
            torch.manual_seed(_SEEDS[1])  # the same cotangents in each run
            leaves = [t for t in (*clones, *held) if isinstance(t, Tensor) and t.requires_grad]
            gradients = _gradients(outputs, leaves)
            changed = [t.detach().clone() for t in held]
        return _Run(
            tensors=[t.detach() for t in outputs],
            gradients=gradients,
            inputs=[*(t.detach() for t in clones if isinstance(t, Tensor)), *changed],
        )

    def _run_in_64_bit(self, function: Callable[..., Any]) -> _Run | None:
        """The reference for the error that eager itself makes; ``None`` where the graph pins its dtypes."""
        floats = [t for t in self._inputs if isinstance(t, Tensor) and t.is_floating_point()]
        if self._held or not floats or any(t.dtype is torch.float64 for t in floats):
            return None
        try:
            return self._run(function, _SEEDS[0], widened=True)
        except Exception:  # noqa: BLE001  # whatever the graph has against 64-bit inputs
            return None


@contextmanager
def _values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Tensors that a run changes in place have their values again afterwards."""
    before = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    differentiable = [t for t in outputs if t.requires_grad]
    if not (differentiable and leaves and torch.is_grad_enabled()):
        return []
    cotangents = [_cotangent(t) for t in differentiable]
    return list(torch.autograd.grad(differentiable, leaves, cotangents, allow_unused=True))


def _widened(inputs: Sequence[Any]) -> list[Any]:
    return [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in clone_inputs(inputs)
    ]


def _cotangent(output: Tensor) -> Tensor:
    """Random numbers that are the same in every dtype, so that a 64-bit run gets the same ones."""
    return torch.randn(output.shape, device=output.device).bfloat16().to(output.dtype)


def clone_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Copies of tensors that share memory with each other as the originals do; the rest as it is."""
    storages: dict[int, Any] = {}
    tensors: dict[int, Tensor] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in tensors:
            storage = value.untyped_storage()
            copied = storages.setdefault(storage.data_ptr() or id(value), None)
            if copied is None:
                copied = storages[storage.data_ptr() or id(value)] = storage.clone()  # type: ignore[no-untyped-call]
            copy = torch.empty(0, dtype=value.dtype, device=value.device)
            copy.set_(copied, value.storage_offset(), value.shape, value.stride())
            tensors[id(value)] = copy.requires_grad_(value.requires_grad)
        return tensors[id(value)]

    with torch.no_grad():
        return [clone(value) for value in inputs]


def _pairs(a: _Run, b: _Run) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    for name in ("tensors", "gradients", "inputs"):
        yield from zip(getattr(a, name), getattr(b, name), strict=False)


def _same_kinds(a: _Run, b: _Run) -> bool:
    return (
        len(a.tensors) == len(b.tensors)
        and len(a.gradients) == len(b.gradients)
        and all(
            (x is None) == (y is None) and (x is None or y is None or x.shape == y.shape)
            for x, y in _pairs(a, b)
        )
    )


def _largest_difference(a: _Run, b: _Run) -> float:
    """Largest absolute difference; infinite where one has NaN and the other has not."""
    worst = 0.0
    for x, y in _pairs(a, b):
        if x is None or y is None or x.shape != y.shape or not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            worst = max(worst, 0.0 if torch.equal(x, y) else float("inf"))
            continue
        gap = (x.to(torch.complex128 if x.is_complex() else torch.float64) - y).abs()
        both_odd = ~x.isfinite() & ~y.isfinite() & ((x == y) | (x.isnan() & y.isnan()))
        gap = torch.where(both_odd, torch.zeros_like(gap), gap)
        worst = max(worst, float(torch.nan_to_num(gap, nan=float("inf"), posinf=float("inf")).max()))
    return worst


def _all_agree(eager: _Run, compiled: _Run, reference: _Run | None) -> bool:
    if reference is None or not _same_kinds(eager, reference):
        reference = eager
    for (x, y), (_, wide) in zip(_pairs(eager, compiled), _pairs(eager, reference), strict=True):
        if x is None or y is None:
            continue
        tolerance = TOLERANCE.get(x.dtype, TOLERANCE[torch.float32])
        if not agree_within_tolerance(x, y, wide, tolerance):
            return False
    return True
