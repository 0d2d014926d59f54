"""A graph in 64 bit, although it names narrower dtypes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_NAMED_BY_DTYPE = {"float", "half", "bfloat16"}

_AS_IT_IS = ("rand", "normal", "bernoulli", "dropout", "multinomial", "exponential", "uniform", "autocast")
"""Parts of the names of what keeps its dtype: what draws would have other numbers, and autocast knows narrow
dtypes only, and lets 64-bit numbers be."""


class Widened(TorchFunctionMode):
    """Inside, ``x.to(torch.bfloat16)``, ``x.float()`` and ``dtype=torch.float32`` give 64-bit numbers.

    Without it, a step that says which of its parts are narrow (mixed precision, rotary positions, norms that
    are computed in 32 bit) would have no 64-bit run, for its dtypes would not fit together, or one that is
    rounded in its middle.

    Raises:
        TypeError: inside, where bits are read as another dtype, which have no wider form.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        named = [*args, *(kwargs or {}).values()]
        if name in _NAMED_BY_DTYPE and isinstance(named[0], torch.Tensor):
            return named[0].to(_WIDER.get(named[0].dtype, torch.float64))
        if not any(isinstance(value, torch.dtype) for value in named) or any(p in name for p in _AS_IT_IS):
            return func(*args, **(kwargs or {}))
        if name.startswith("view"):
            raise TypeError("bits read as another dtype have no 64-bit form")
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value
