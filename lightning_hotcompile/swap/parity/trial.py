"""One run of a captured graph on copies of its inputs, forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hotcompile.swap.dynamo import CompiledFn, version_of
from lightning_hotcompile.swap.parity.clones import (
    Kept,
    RandomState,
    clone_inputs,
    leaf_of,
    seed_all,
    with_gradient_of,
)
from lightning_hotcompile.swap.parity.difference import Run, flat, of_output
from lightning_hotcompile.swap.parity.leaf_gradients import edges_of, gradients_of
from lightning_hotcompile.swap.parity.proportion import movements
from lightning_hotcompile.swap.parity.reach import made_by, reach_of
from lightning_hotcompile.swap.parity.widen import Widened
from lightning_hotcompile.swap.process.free_memory import why_memory_is_short
from lightning_hotcompile.swap.process.said_in_vain import nothing_said_in_vain
from lightning_hotcompile.swap.process.saved_tensors import not_of_the_user
from lightning_hotcompile.swap.process.thread_state import put_back_after_errors, without_autocast

_COTANGENT_SEED = 20_021

_WIDE_COPIES = 4.0
"""Sets of inputs for which there must be memory before they are run in 64 bit."""


class Trial:
    """Runs functions on the same inputs, one after the other, each on a fresh copy.

    Args:
        inputs: of the graph.
        held: tensors that the functions hold by themselves; each run finds them as they were.
        backward_outside: whether backwards run outside of the autocast around the forward.
    """

    def __init__(
        self, inputs: Sequence[Any], held: Sequence[Tensor], *, backward_outside: bool = False
    ) -> None:
        self._inputs = inputs
        self._held = held
        self._around_backward = without_autocast if backward_outside else contextlib.nullcontext

    def held_put_back(self) -> AbstractContextManager[list[Tensor]]:
        """Held tensors that are changed inside have their values again afterwards."""
        return _put_back(self._held)

    def run(
        self,
        function: CompiledFn,
        seed: int,
        *,
        widened: bool = False,
        last: bool = False,
        unused: bool = False,
    ) -> Run:
        """One run, gradients with one random cotangent.

        The last one leaves the held tensors as they become, so that no copy of them is needed: it has to be
        inside of :meth:`held_put_back`. ``widened`` runs in 64 bit, without what is held; ``unused`` takes
        zeros for the cotangent.
        """
        if not (last or widened):
            with _put_back(self._held) as held:
                run = self.run(function, seed, last=True, unused=unused)
                count = len(run.inputs) - len(self._held)
                before = [*(t for t in self._inputs if isinstance(t, Tensor)), *held]
                return replace(
                    run,
                    movement=movements(run.inputs, before),
                    held=len(held),
                    inputs=run.inputs[:count] + [t.clone() for t in run.inputs[count:]],
                )
        seed_all(seed)
        clones = _widened(self._inputs) if widened else clone_inputs(self._inputs)
        held = [] if widened else list(self._held)
        # Before the run: it may write what wants a gradient into an input that wants none.
        to_inputs = {i: leaf_of(t) for i, t in enumerate(clones) if isinstance(t, Tensor) and t.requires_grad}
        leaves = [*to_inputs.values(), *(t for t in held if t.requires_grad)]
        edges = edges_of(leaves)
        versions, state = [_version(t) for t in (*clones, *held)], RandomState()
        places = [{_memory_of(t)} if isinstance(t, Tensor) else set[int]() for t in clones]
        in_use = [t.untyped_storage() for t, there in zip(clones, places, strict=True) if any(there)]
        kept = weakref.WeakSet[_Saved]()
        counted = {i: t for i, t in enumerate(clones) if isinstance(t, Tensor) and not t.requires_grad}
        at_last_save = {i: _version(t) for i, t in counted.items()}

        def pack(tensor: Tensor) -> _Saved:
            kept.add(found := _Saved(tensor))
            at_last_save.update((i, _version(t)) for i, t in counted.items())
            return found

        hooks = saved_tensors_hooks(not_of_the_user(pack), _Saved.unpacked)
        with put_back_after_errors(), nothing_said_in_vain(), hooks:
            outputs = [t for t in flat(function(*clones)) if isinstance(t, Tensor)]
        # Not what was saved for a backward that no output leads to.
        saved = {_memory_of(each.tensor) for each in kept}
        del in_use  # until now no other tensor could come to lie where an input has been
        late = tuple(i for i, t in counted.items() if _has_changed(t, at_last_save[i]))
        after, (reach, apart) = RandomState(), reach_of(outputs, to_inputs)
        # An input that was written to has a backward, too, and compiled code has one for all of them.
        written = [clones[i] for i in to_inputs if _has_changed(clones[i], versions[i])]
        apart = () if written else apart
        written = [t for t in written if t.grad_fn is not None]  # else what was written wants no gradient
        seed_all(_COTANGENT_SEED)  # the same cotangents in each run
        with self._around_backward():
            cotangent = torch.zeros_like if unused else _cotangent
            gradients = gradients_of([*outputs, *written], leaves, edges, cotangent)
        changed = [_has_changed(t, v) for t, v in zip((*clones, *held), versions, strict=True)]
        return Run(
            tensors=[t.detach() for t in outputs],
            gradients=gradients,
            inputs=[t.detach() for t in (*clones, *held) if isinstance(t, Tensor)],
            changed=tuple(i for i, c in enumerate(changed[: len(clones)]) if c),
            changed_held=tuple(i for i, c in enumerate(changed[len(clones) :]) if c),
            random=not state.is_same(after),
            on_cpu=state.is_same(after, of_gpus=True) and not state.is_same(after),
            drawn=after.states[0],
            saved=(
                *(i for i, clone in enumerate(clones) if _is_among(clone, saved, places[i])),
                *(of_output(i) for i, output in enumerate(outputs) if _is_among(output, saved)),
            ),
            moved=tuple(i for i, t in enumerate(clones) if places[i] and _memory_of(t) not in places[i]),
            by_compiler=any(made_by(output)[0] is not None for output in outputs),
            late=late,
            sharing=_sharing(dict(zip(to_inputs, gradients, strict=False))),
            reach=reach,
            apart=apart,
            several=sum(t.requires_grad for t in outputs) > 1,
        )

    def shares_what_changes(self, changed: Sequence[int]) -> bool:
        """Whether the graph changes one of two inputs that overlap in memory, as far as their ends tell.

        Compiled code writes to both as they lay when it was compiled, and no guard looks at where that was.
        """
        tensors = {id(t): t for t in self._inputs if isinstance(t, Tensor) and _memory_of(t) and t.numel()}
        written = [t for i in changed if (t := self._inputs[i]) is not None and id(t) in tensors]
        return any(
            other is not tensor and _memory_of(other) == _memory_of(tensor) and _overlap(other, tensor)
            for tensor in written
            for other in tensors.values()
        )

    def share_memory(self, positions: Sequence[int], others: Sequence[int]) -> frozenset[int]:
        """Those of the inputs that lie in the memory of one of the others, whatever part of it."""
        memory = {_memory_of(t) for i in others if isinstance(t := self._inputs[i], Tensor)}
        return frozenset(i for i in positions if _is_among(self._inputs[i], memory))

    @property
    def holds_tensors(self) -> bool:
        """Whether the functions hold any by themselves."""
        return bool(self._held)

    def run_in_64_bit(
        self, function: CompiledFn, seed: int, widens: Callable[[], Widened] = Widened
    ) -> Run | None:
        """The reference for the error that eager itself makes; ``None`` where the graph has no such form."""
        floats = [t for t in self._inputs if isinstance(t, Tensor) and t.is_floating_point()]
        if self._held or not floats or any(t.dtype is torch.float64 for t in floats):
            return None
        if why_memory_is_short(floats, _WIDE_COPIES) is not None:
            return None

        def wide(*args: Any) -> Any:
            with widens():
                return function(*args)

        try:
            return self.run(wide, seed, widened=True)
        except torch.OutOfMemoryError:
            raise  # without a reference right code would be called wrong
        except Exception:  # noqa: BLE001  # whatever the graph has against 64-bit inputs
            return None


class _Saved:
    """A tensor that a backward keeps: it is there as long as that is.

    With its own backward an output (of ``exp``) would keep itself, and all that led to it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()

    def unpacked(self) -> Tensor:
        return self.tensor


def _memory_of(tensor: Tensor) -> int:
    """What tells memory apart; 0 where there is none that could be told."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_among(value: Any, memory: set[int], before: Collection[int] = ()) -> bool:
    """Whether a tensor that is not empty lies in one of these places, or did ``before`` it got another."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return False
    return not memory.isdisjoint((_memory_of(value), *before))


def _version(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) else None


def _has_changed(value: Any, before: int | None) -> bool:
    """Whether a tensor may have changed; one that nobody counts the changes of may have."""
    return isinstance(value, Tensor) and (before is None or version_of(value) != before)


@contextmanager
def _put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are changed inside have their values, which it gives, again afterwards."""
    kept = Kept(tensors)
    try:
        yield kept.values
    finally:
        kept.put_back()


def _sharing(gradients: Mapping[int, Tensor | None]) -> tuple[int, ...]:
    """Positions of gradients that share memory with one at an earlier position; not one tensor for both."""
    found: dict[int, list[Tensor]] = {}
    sharing = []
    for i, gradient in gradients.items():
        if gradient is None or not _memory_of(gradient) or not gradient.numel():
            continue
        others = found.setdefault(_memory_of(gradient), [])
        if any(gradient is not other and _overlap(gradient, other) for other in others):
            sharing.append(i)
        others.append(gradient)
    return tuple(sharing)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one memory have a part of it in common, as far as their ends tell."""
    (first, last), (other_first, other_last) = map(_ends, (a, b))
    return first <= other_last and other_first <= last


def _ends(tensor: Tensor) -> tuple[int, int]:
    """The first and last byte of its elements, in its memory."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return int(first * size), int((last + 1) * size - 1)


def _cotangent(output: Tensor) -> Tensor:
    """Random numbers that are the same in every dtype, so that a 64-bit run gets the same ones."""
    return torch.randn(output.shape, device=output.device).bfloat16().to(output.dtype)


def _widened(inputs: Sequence[Any]) -> list[Any]:
    return [
        with_gradient_of(t.detach().double(), t) if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in clone_inputs(inputs)
    ]
