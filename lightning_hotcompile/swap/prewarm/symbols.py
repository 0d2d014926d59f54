"""Sizes that vary, in words: another process gives the same dimensions the same symbols.

The compiler's caches know a graph by the names of its symbols. The values of a step are hints and no more:
the code is for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatefulSymbolicContext

from lightning_hotcompile.errors import HotCompileError


class NotPortable(HotCompileError):
    """A graph cannot be compiled in another process; the message says why."""


@dataclass(frozen=True, kw_only=True)
class SizeSpec:
    """A size that a graph is given beside its tensors: the name of its symbol, and its value in one step."""

    symbol: str
    hint: int

    @classmethod
    def of(cls, name: str, value: torch.SymInt) -> SizeSpec:
        """Describe a graph's input.

        Raises:
            NotPortable: it is computed from other sizes, or has no value yet.
        """
        symbol, hint = _symbol(name, value), value.node.hint
        if symbol is None or not isinstance(hint, int):
            raise NotPortable(f"input {name} is a size without a value: only known ones can be described")
        return cls(symbol=symbol, hint=hint)


def symbols_of(placeholder: Node) -> tuple[str | None, ...]:
    """For each size of an input the name of its symbol, ``None`` where it is a number; empty if all are.

    Raises:
        NotPortable: a size is computed from others, or nobody knows where the input is from.
    """
    seen = placeholder.meta.get("example_value")
    if not isinstance(seen, Tensor):
        return ()
    found = tuple(_symbol(placeholder.name, size) for size in seen.shape)
    if not any(found):
        return ()
    if getattr(placeholder, "_dynamo_source", None) is None:
        raise NotPortable(f"input {placeholder.name} has sizes that vary, and its place is not known")
    return found


def _symbol(name: str, size: Any) -> str | None:
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    if isinstance(expression, sympy.Integer):
        return None
    if not isinstance(expression, sympy.Symbol):
        raise NotPortable(f"input {name} has a size {expression}: only single symbols can be described")
    return str(expression)


class Symbols:
    """The same symbols in another process.

    Args:
        env: of the graph that is rebuilt there.
        inputs: of the graph; those that are sizes have symbols.
        sources: for each input the place where Dynamo met it.
    """

    def __init__(self, env: ShapeEnv | None, inputs: Sequence[Any], sources: Sequence[Any]) -> None:
        assert env is not None
        self._env = env
        sizes = [(i, s) for i, s in zip(inputs, sources, strict=True) if isinstance(i, SizeSpec)]
        self._known = {spec.symbol: self._made(spec, source) for spec, source in sizes}

    def _made(self, spec: SizeSpec, source: Any) -> Any:
        """Of sizes that have to be equal Dynamo keeps one symbol, which need not be that of this place."""
        env: Any = self._env
        try:
            env._generate_unique_id = lambda _: int(spec.symbol[1:])
            symbol = env.create_symbol(spec.hint, source, DimDynamic.DYNAMIC)
        finally:
            del env._generate_unique_id
        if str(symbol) != spec.symbol:
            raise NotPortable(f"the size {spec.symbol} became {symbol}")
        return symbol

    def size(self, spec: SizeSpec, source: Any) -> torch.SymInt:
        """The input of a graph that is a size."""
        made = self._env.create_symintnode(self._known[spec.symbol], hint=spec.hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    def context(self, symbols: Sequence[str | None], source: Any) -> StatefulSymbolicContext:
        """How to make a fake tensor with these symbols for its sizes, out of one of numbers.

        Raises:
            NotPortable: a symbol that is no input of the graph.
        """
        places = {
            TensorPropertySource(source, TensorProperty.SIZE, dim).name: self._of(symbol)
            for dim, symbol in enumerate(symbols)
            if symbol is not None
        }
        return StatefulSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if symbol else DimDynamic.STATIC for symbol in symbols],
            tensor_source=source,
            shape_env_to_source_to_symbol_cache={id(self._env): places},
        )

    def _of(self, symbol: str) -> Any:
        if symbol not in self._known:
            raise NotPortable(f"the size {symbol} is no input of the graph")
        return self._known[symbol]
