"""The runs after the first: NaN where eager has none, or an error, is found and answered by eager."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.apart import unseen_by_modes
from lightning_hotcompile.swap.parity.clones import Kept, RandomState, clone_inputs, random_state_kept
from lightning_hotcompile.swap.parity.difference import flat
from lightning_hotcompile.swap.parity.tensors import comparable
from lightning_hotcompile.swap.parity.verdict import Parity
from lightning_hotcompile.swap.process.free_memory import why_memory_is_short
from lightning_hotcompile.swap.process.thread_state import without_autocast_cache

_log = logging.getLogger(__name__)


class Before:
    """What a graph is about to change, kept: its inputs, what it holds, the random state."""

    def __init__(self, inputs: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        self.inputs = Kept(inputs)
        self.held = Kept(held)
        self._random = RandomState()

    def put_back(self) -> None:
        """All as if the graph had not run."""
        with unseen_by_modes():
            self.inputs.put_back()
            self.held.put_back()
        self._random.put_back()

    @contextmanager
    def random(self) -> Iterator[None]:
        """The random state of then, inside only."""
        with random_state_kept():
            self._random.put_back()
            yield


class Tripwire:
    """Looks for NaN and Inf that only compiled code makes.

    Where an output or a changed tensor is not finite, the captured graph runs on the same inputs: if it
    gives finite numbers there, the compiled code is wrong. If it does not, that is how the training is.

    Args:
        eager: the captured graph.
        held: tensors that it holds by itself.
        parity: what the comparison has learned: which of inputs and held tensors change.
    """

    def __init__(self, eager: CompiledFn, held: Sequence[Tensor], parity: Parity) -> None:
        self._eager = eager
        self._changed = parity.changed
        self._held = [held[i] for i in parity.changed_held]

    def why_not(self, args: Sequence[Any]) -> str | None:
        """Why what these inputs change cannot be kept, ``None`` if it can."""
        reason = why_memory_is_short(self._tensors(args), 2.0)
        return reason and f"not looked at for NaN for lack of memory: {reason}"

    def before(self, args: Sequence[Any]) -> Before | None:
        """Keep what the graph is about to change, ``None`` if there is no memory for it."""
        try:
            with unseen_by_modes():
                return Before([args[i] for i in self._changed], self._held)
        except torch.OutOfMemoryError:
            return None

    def _tensors(self, args: Sequence[Any]) -> list[Tensor]:
        return [*(args[i] for i in self._changed), *self._held]

    def finds(self, outputs: Any, args: Sequence[Any], before: Before) -> bool:
        """Whether something is not finite that eager makes finite. Nothing is changed by looking.

        Without memory to look nothing is found.
        """
        with unseen_by_modes():
            return self._finds(outputs, args, before)

    def _finds(self, outputs: Any, args: Sequence[Any], before: Before) -> bool:
        try:
            odd = _not_finite([*flat(outputs), *self._tensors(args)])
            if not odd:
                return False
            ours = Kept(self._held)
        except torch.OutOfMemoryError:
            return False
        try:
            finite = self._finite_in_eager(args, before)
        finally:
            ours.put_back()
        return any(finite[i] for i in odd if i < len(finite))

    def _finite_in_eager(self, args: Sequence[Any], before: Before) -> list[bool]:
        """For each output and changed tensor; empty if eager cannot tell.

        It runs on copies: changing the inputs themselves, if only for a moment, would invalidate what
        autograd has saved of them.
        """
        try:
            with torch.no_grad(), before.random(), without_autocast_cache():
                clones = clone_inputs(args)
                changed = [clones[i] for i in self._changed]
                for clone, value in zip(changed, before.inputs.values, strict=True):
                    clone.copy_(value)
                before.held.put_back()
                outputs = self._eager(*clones)
                return [_is_finite(t) for t in (*flat(outputs), *changed, *self._held)]
        except Exception:  # noqa: BLE001  # the user's own error, or no memory: nothing is proven
            _log.debug("the captured graph could not be run once more", exc_info=True)
            return []


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_finite(value: Any) -> bool:
    return not _is_float(value) or bool(comparable(value.detach()).isfinite().all())


def _not_finite(values: Sequence[Any]) -> list[int]:
    """Positions of the tensors with NaN or Inf; one question to each device, and more only if it says so."""
    floats = [(i, v) for i, v in enumerate(values) if _is_float(v)]
    with torch.no_grad():
        verdicts = [(i, comparable(v).isfinite().all()) for i, v in floats]
        devices: dict[torch.device, list[Tensor]] = {}
        for _, verdict in verdicts:
            devices.setdefault(verdict.device, []).append(verdict)
        if all(bool(torch.stack(on_device).all()) for on_device in devices.values()):
            return []
        return [i for i, verdict in verdicts if not verdict]
