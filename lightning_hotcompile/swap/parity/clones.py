"""Copies of a graph's inputs, and tensors that get their values back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def why_not_cloned(inputs: Sequence[Any]) -> str | None:
    """Why some input cannot be copied faithfully, ``None`` if all can."""
    for value in inputs:
        if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"an input is of type {type(value).__name__}"
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            return f"an input has layout {value.layout}"
    return None


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
            tensors[id(value)] = with_gradient_of(copy, value)
        return tensors[id(value)]

    with torch.no_grad():
        return [clone(value) for value in inputs]


class _ComesFrom(torch.autograd.Function):
    """The data as they lie, with the gradient going to another tensor."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, data: Tensor) -> Tensor:
        """The same tensor, which is no leaf from now on."""
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """All of it."""
        return gradient, None


def with_gradient_of(copy: Tensor, original: Tensor) -> Tensor:
    """Let a copy want a gradient if the original does, and be a leaf only if the original is one.

    A graph may change what is no leaf in place; in a leaf autograd does not allow that.
    """
    if not original.requires_grad or original.is_leaf:
        return copy.requires_grad_(original.requires_grad)
    with torch.enable_grad():
        source = copy.new_zeros(()).expand(copy.shape).requires_grad_()
        found: Tensor = _ComesFrom.apply(source, copy)  # type: ignore[no-untyped-call]
    return found


def leaf_of(copy: Tensor) -> Tensor:
    """What the gradient of a copy that nothing has changed yet goes to: itself, or what it comes from."""
    if copy.grad_fn is None:
        return copy
    leaf: Tensor = copy.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    return leaf


class Kept:
    """The values of some tensors as they are now, to be put back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.values = [t.detach().clone() for t in tensors]

    def put_back(self) -> None:
        """Give the tensors their values again; those that have them still are not touched.

        Without memory to tell, which takes some, they are all written to, which takes none.
        """
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.values, strict=True):
                if not _are_known_equal(tensor, value):
                    tensor.copy_(value)


def _are_known_equal(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except torch.OutOfMemoryError:
        return False


class RandomState:
    """The state of torch's default generators, those of all accelerators in use included."""

    def __init__(self) -> None:
        self._devices = _accelerators_in_use()
        self.states = [torch.get_rng_state(), *map(_state_of, self._devices)]

    def is_same(self, other: RandomState, *, of_gpus: bool = False) -> bool:
        """Whether no number was drawn between the two; ``of_gpus``: none of an accelerator's."""
        both = zip(self.states[of_gpus:], other.states[of_gpus:], strict=False)
        return all(torch.equal(a, b) for a, b in both)

    def put_back(self) -> None:
        """The next numbers are those that would have come then."""
        cpu, *others = self.states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, others, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Random numbers drawn inside do not count: afterwards the next ones are as if nothing had been drawn."""
    before = RandomState()
    try:
        yield
    finally:
        before.put_back()


def _state_of(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def seed_all(seed: int) -> None:
    """Seed the generators in use; ``torch.manual_seed`` would leave its seed to an accelerator of later."""
    torch.default_generator.manual_seed(seed)
    for kind in {device.type for device in _accelerators_in_use()}:
        module: Any = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def _accelerators_in_use() -> list[torch.device]:
    """All of them: a seed that is set goes to each, whichever the graph uses."""
    found = [torch.device("mps")] if torch.backends.mps.is_available() else []
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        if module.is_available() and module.is_initialized():
            found += [torch.device(kind, index) for index in range(module.device_count())]
    return found
