"""What kind of step is this: the batch's shapes and the model's state as one comparable value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_hotcompile.watch.family import Families
from lightning_hotcompile.watch.structure import describe

_TRAINING = attrgetter("training")
_REQUIRES_GRAD = attrgetter("requires_grad")
_VARIED_TOO_OFTEN = 3


class StepSignature(NamedTuple):
    """Two steps with equal signatures run the same code on tensors of the same shapes.

    Equality and hash are those of the tuple, so a comparison costs under a microsecond.
    ``digest`` is for people and files: the same in every process.
    """

    stage: str
    batch: Hashable
    values: tuple[Hashable, ...]
    training: Hashable
    requires_grad: Hashable
    grad_mode: str
    autocast: tuple[Hashable, ...]
    precision: str
    fp8: Hashable

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this signature in logs and files."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=6).hexdigest()


def _flags(flag_of: Callable[[Any], Any], owners: Sequence[Any]) -> Hashable:
    """Many booleans as one cheap value; anything odd as a tuple."""
    try:
        return bytes(map(flag_of, owners))
    except (TypeError, ValueError):
        return tuple(map(flag_of, owners))


_READS = 16
"""Signatures that are read before it is looked again which modules there are."""


class SignatureReader:
    """Reads the signature of each step of one model.

    Ints and strings in a batch count as part of its signature until they were seen to change
    three times while everything else stayed the same (file names, lengths, indices): from then
    on only their types count, as from the first in long lists. Other bools always count: they switch between
    two ways through a step.

    Batches that differ only in sizes that vary all the time are a family and have one signature, see
    :class:`~lightning_hotcompile.watch.family.Families`.

    Args:
        module: the model whose ``training`` and ``requires_grad`` flags are part of the signature.
        precision: a name for the numeric precision of the whole run, for example ``"bf16-mixed"``.
        families: learns what varies; by default with its own settings.
    """

    def __init__(self, module: nn.Module, precision: str = "", families: Families | None = None) -> None:
        self._module = module
        self._precision = precision
        self.families = families if families is not None else Families()
        self._last: tuple[Hashable, tuple[Hashable, ...]] | None = None
        self._varied = 0
        self.refresh()

    def refresh(self) -> None:
        """Look again which modules and parameters there are."""
        self._until_refresh = _READS
        self._modules = tuple(self._module.modules())
        own = (p for module in self._modules for p in module._parameters.values() if p is not None)
        self._parameters = tuple({id(p): p for p in own}.values())  # as parameters(), in one walk
        devices = {p.device.type for p in self._parameters} | {"cpu"}
        self._device_types = tuple(sorted(d for d in devices if d in ("cpu", "cuda", "mps", "xpu")))

    def read(self, batch: Any, *, stage: str = "train", fp8: Hashable = None) -> StepSignature:
        """The signature of the step that is about to run on ``batch``."""
        self._until_refresh -= 1
        if not self._until_refresh:
            self.refresh()  # a module that was given up in mid-epoch is not kept
        found: list[Hashable] = []
        structure = self.families.described(describe(batch, found))
        return StepSignature(
            stage=stage,
            batch=structure,
            values=self._stable_values(structure, tuple(found)) if found else (),
            training=_flags(_TRAINING, self._modules),
            requires_grad=_flags(_REQUIRES_GRAD, self._parameters),
            grad_mode=_grad_mode(),
            autocast=tuple(map(_autocast_state, self._device_types)),
            precision=self._precision,
            fp8=fp8,
        )

    def _stable_values(self, structure: Hashable, values: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        switches = tuple(v for v in values if isinstance(v, bool))
        if self._varied >= _VARIED_TOO_OFTEN:
            return switches
        now = ((structure, switches), tuple(v for v in values if not isinstance(v, bool)))
        if self._last is not None and now[0] == self._last[0] and now[1] != self._last[1]:
            self._varied += 1
        self._last = now
        return values


def _grad_mode() -> str:
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def _autocast_state(device_type: str) -> Hashable:
    if not torch.is_autocast_enabled(device_type):
        return (device_type, False)
    return (device_type, True, torch.get_autocast_dtype(device_type))
