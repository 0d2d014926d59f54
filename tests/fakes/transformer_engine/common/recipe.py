"""FP8 recipes: mutable, without a hash, with a cached ``repr`` that leaves a field out."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class _FormatMaxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatMaxima(max_fwd=448.0, max_bwd=448.0)
    HYBRID = _FormatMaxima(max_fwd=448.0, max_bwd=57344.0)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


class Recipe:
    _cached_repr: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_cached_repr":
            object.__setattr__(self, "_cached_repr", None)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        if self._cached_repr is None:
            self._cached_repr = self._describe()
        return self._cached_repr

    def _describe(self) -> str:
        raise NotImplementedError


@dataclass(repr=False)
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    reduce_amax: bool = True

    def _describe(self) -> str:
        return f"DelayedScaling(margin={self.margin}, amax_history_len={self.amax_history_len})"


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)

    def _describe(self) -> str:
        return f"Float8CurrentScaling(fp8_format={self.fp8_format.name})"
