"""The dimensions that vary within a family of batches: compiled for any size, and at once.

They are marked in what a region is called with. After a graph break, and in functions that are called there,
Dynamo meets other tensors of these sizes, and numbers, and sizes that depend on what is in the tensors
(``x[mask]``): it would compile for the first one, and anew for the second.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.variables import builder

from lightning_hotcompile.swap.tracing.left_variable import STACK
from lightning_hotcompile.swap.tracing.overrides import Override
from lightning_hotcompile.watch.family import LARGEST_SPECIAL
from lightning_hotcompile.watch.structure import FamilyShape, shapes_in, tensors_in

PATIENCE = 32
"""Steps in one fit that may go by in wait for a batch whose varying sizes are like no other size."""

# What a mark is: Dynamo compiles the dimension for any size, but may do otherwise where the code asks for it.
_MARK = "_dynamo_weak_dynamic_indices"
_ANY_MARK = "_has_dynamo_dim_marking"


@dataclass(frozen=True, kw_only=True)
class DynamicDims:
    """What varies in one batch of a family.

    Of the batch's own tensors it is known which dimensions vary; in activations, which a region gets, it is
    those of a varying size.
    """

    of_tensor: Mapping[int, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)
    """Tensors of the batch by ``id``, each with its varying dimensions."""

    sizes: frozenset[int] = frozenset()
    """What the varying dimensions measure in this batch, and their products in a flattened tensor."""

    ambiguous: bool = False
    """Whether a varying size is also that of something that does not vary."""

    known: frozenset[int] | None = None
    """Sizes of all tensors of such a step before, and of the parameters; ``None`` if that is not known."""

    @classmethod
    def of(cls, batch: Any, described: Hashable, others: frozenset[int] = frozenset()) -> DynamicDims:
        """Of a batch and its description; ``others`` are sizes of parameters."""
        shapes = [shape for _, shape in shapes_in(described)]
        if not any(isinstance(shape, FamilyShape) for shape in shapes):
            return NOTHING_VARIES
        of_tensor: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        sizes: dict[str, int] = {}
        fixed, flat = set(others), set()
        for tensor, shape in zip(tensors_in(batch), shapes, strict=True):
            dims = tuple(i for i, size in enumerate(shape) if isinstance(size, str))
            fixed |= {n for i, n in enumerate(tensor.shape) if i not in dims}
            sizes |= {shape[i]: tensor.shape[i] for i in dims}
            if dims:
                of_tensor[id(tensor)] = (tensor, dims)
                flat.add(math.prod(tensor.shape[:2]))
        varying = set(sizes.values())
        ambiguous = bool(varying & fixed) or len(varying) < len(sizes)
        return cls(of_tensor=of_tensor, sizes=frozenset(varying | flat), ambiguous=ambiguous)

    @contextlib.contextmanager
    def marked(self, *values: Any) -> Iterator[None]:
        """Varying dimensions of the tensors in ``values`` are marked in here, and not any longer after it.

        The marks are attributes of tensors that may be the user's: left on, they would be pickled with them.
        """
        todo = dict(self.of_tensor)
        for tensor in tensors_in(values) if self.sizes else ():
            dims = tuple(i for i, size in enumerate(tensor.shape) if size in self.sizes)
            todo.setdefault(id(tensor), (tensor, dims))
        with contextlib.ExitStack() as stack:
            for tensor, dims in todo.values():
                if dims and not isinstance(tensor, nn.Parameter):
                    stack.callback(_restore, tensor, {k: vars(tensor).get(k) for k in (_MARK, _ANY_MARK)})
                    vars(tensor).pop(_MARK, None)  # a set that the user may have put there is not to grow
                    torch._dynamo.maybe_mark_dynamic(tensor, dims)
            token = _in_use.set(self)
            stack.callback(_in_use.reset, token)
            yield

    def is_varying(self, size: object) -> bool:
        """Whether this is what a varying dimension of the batch measures, and nothing else in it does."""
        return type(size) is int and size in self.sizes and not self.ambiguous

    def is_new(self, size: object) -> bool:
        """Whether no tensor measured this before, so that it is another size in each step."""
        return (
            type(size) is int and size > LARGEST_SPECIAL and self.known is not None and size not in self.known
        )


NOTHING_VARIES = DynamicDims()
"""Of every batch that belongs to no family."""

_in_use: ContextVar[DynamicDims] = ContextVar("dynamic dims in use", default=NOTHING_VARIES)


def overrides() -> list[Override]:
    """What Dynamo does otherwise: while varying dimensions are marked, what measures the same varies, too."""

    def learned(prior: Any, tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
        found, dims = prior(tx, name, entry, **kwargs), _in_use.get()
        if isinstance(found.size, tuple):
            varies = [dims.is_varying(n) or dims.is_new(n) for n in found.size]
            sizes = zip(found.size, varies, strict=True)
            return replace(found, size=tuple(auto_dynamic if any_size else n for n, any_size in sizes))
        is_one = dims.is_new if name.startswith(STACK) else dims.is_varying
        return replace(found, scalar=auto_dynamic) if _is_variable(name) and is_one(found.scalar) else found

    return [Override(builder, "process_automatic_dynamic", learned)]


def _is_variable(name: str) -> bool:
    """Whether a number is a variable of the frame, and not of an object: those are settings, mostly."""
    return name.startswith("L[") and name.count("[") == 1


def _restore(tensor: Tensor, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if value is None:
            vars(tensor).pop(name, None)
        else:
            setattr(tensor, name, value)


def _not_known() -> None:
    return None


class BatchInStep:
    """The batch of the running step: what varies in it, and whether it is a good one to compile on.

    If the varying size happens to be that of another dimension or of a parameter, the compiler may take
    the two for the same and compile for this one size only. Better to wait for another batch, but
    only for so long: lengths may well be of the same powers of two as the layers.

    Args:
        module: the model whose parameters' sizes are compared.
        patience: how many steps may go by in waiting.
    """

    def __init__(self, module: nn.Module, patience: int = PATIENCE) -> None:
        self._module = module
        self._batch: tuple[Any, Hashable] | None = None
        self._dims: DynamicDims | None = None
        self._sizes: Callable[[], frozenset[int] | None] = _not_known
        self.patience = patience

    def begin(
        self, batch: Any, described: Hashable, sizes: Callable[[], frozenset[int] | None] = _not_known
    ) -> None:
        """A step begins; nothing is looked at before somebody asks.

        ``sizes`` tells those of all tensors of such a step before, ``None`` if that is not known.
        """
        self._batch, self._sizes, self._dims = (batch, described), sizes, None

    def end(self) -> None:
        """The step ended: let its batch go."""
        self._batch = self._dims = None
        self._sizes = _not_known

    @property
    def dims(self) -> DynamicDims:
        """What varies in this batch."""
        if self._dims is None:
            parameters = (p for p in self._module.parameters() if not nn.parameter.is_lazy(p))
            sizes = frozenset(n for p in parameters for n in p.shape)
            dims = DynamicDims.of(*self._batch, sizes) if self._batch else NOTHING_VARIES
            known = self._sizes()
            self._dims = dims if known is None else replace(dims, known=known | sizes)
        return self._dims

    def is_one_to_wait_after(self) -> bool:
        """Whether it is better to compile on a later batch; each yes costs patience."""
        if self.patience <= 0 or not self.dims.ambiguous:
            return False
        self.patience -= 1
        return True
