"""Batches that differ only in the size of some dimensions, as one family: one signature, one compile."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_hotcompile.watch.structure import FamilyShape, Member, is_strided, shapes_in

LEAST_SIZES = 4
"""Different sizes that make a dimension a varying one. The short last batch of an epoch is only one more."""

LEAST_SIZES_IF_ALL_IS_DYNAMIC = 2
"""The same where the compiler makes every dimension dynamic anyway."""

MET_WITHIN = 1000
"""Calls within which those sizes have to be met: sizes that stay for long are better compiled one by one."""

_MOST_KINDS = 64
_MOST_DESCRIBED = 1024
LARGEST_SPECIAL = 1
"""Dynamo makes a graph of its own for a size of 0 or 1."""


@dataclass(kw_only=True)
class _Kind:
    """Batches of one structure: which of their sizes move together, and which of those vary.

    A position is one dimension of one tensor, in the order of the batch. Positions with the same number in
    ``together`` had the same size in each batch so far.
    """

    together: list[int]
    first_met: list[dict[int, int]]
    ranges: list[tuple[int, int]]
    varies: list[bool] = field(init=False)
    symbols: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.varies = [False] * len(self.together)
        self.symbols = [None] * len(self.together)

    def meet(self, sizes: Sequence[int], now: int, least: int) -> bool:
        """Learn from one batch; whether the symbols changed."""
        self.together = _numbered(list(zip(self.together, sizes, strict=True)))
        for position, size in enumerate(sizes):
            low, high = self.ranges[position]
            self.ranges[position] = (min(low, size), max(high, size))
            if size > LARGEST_SPECIAL and not self.varies[position]:
                self._count(position, size, now, least)
        before, self.symbols = self.symbols, self._name_symbols()
        return before != self.symbols

    def _count(self, position: int, size: int, now: int, least: int) -> None:
        met = self.first_met[position]
        met.setdefault(size, now)
        self.varies[position] = sum(now - at <= MET_WITHIN for at in met.values()) >= least
        if self.varies[position]:
            met.clear()

    def _name_symbols(self) -> list[str | None]:
        varying = [t for t, varies in zip(self.together, self.varies, strict=True) if varies]
        names = {number: f"n{i}" for i, number in enumerate(dict.fromkeys(varying))}
        return [names.get(number) for number in self.together]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether a batch of these sizes belongs to the family."""
        pairs = list(zip(self.symbols, sizes, strict=True))
        return any(self.symbols) and not any(s is not None and n <= LARGEST_SPECIAL for s, n in pairs)


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


class Families:
    """Learns which dimensions vary, and describes all batches of a family in the same way.

    A dimension varies once ``least_sizes`` different sizes of it were met for the first time within
    ``MET_WITHIN`` calls, in batches of the same structure and dtypes. A symbol (``n0``) then stands for its
    size in the description; dimensions that always had equal sizes share one. What was found to vary
    stays so. A batch in which such a dimension is 0 or 1 is no member: compilers treat these sizes apart.

    Args:
        least_sizes: sizes to be met; ``None`` for no families at all.

    Example:
        >>> families = Families()
        >>> for n in (5, 6, 7, 8):
        ...     described = families.described(describe(torch.zeros(2, n), []))
        >>> described[1]
        (2, 'n0')
    """

    def __init__(self, least_sizes: int | None = LEAST_SIZES) -> None:
        self._least = least_sizes
        self._kinds: dict[Hashable, _Kind] = {}
        self._described: dict[Hashable, Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (None, None)
        self._now = 0

    @classmethod
    def for_setting(cls, dynamic: object) -> Families:
        """What suits the callback's option ``dynamic``: none for ``False``, few sizes for ``True``."""
        if dynamic is False:
            return cls(None)
        return cls(LEAST_SIZES_IF_ALL_IS_DYNAMIC if dynamic is True else LEAST_SIZES)

    def described(self, structure: Hashable) -> Hashable:
        """The structure itself, or that of its family. Cheap for a structure that was seen before."""
        if self._least is None:
            return structure
        self._now += 1
        last, described = self._last
        if structure == last:
            return described
        known = self._described.get(structure)
        described = self._learn(structure, self._least) if known is None else known
        self._last = (structure, described)
        return described

    def _learn(self, structure: Hashable, least: int) -> Hashable:
        sizes: list[int] = []
        skeleton = _without_sizes(structure, sizes)
        kind = self._kind(skeleton, sizes)
        if kind.meet(sizes, self._now, least) or len(self._described) >= _MOST_DESCRIBED:
            self._described.clear()
        described = structure
        if kind.holds(sizes):
            named = [n if s is None else s for s, n in zip(kind.symbols, sizes, strict=True)]
            described = _with_sizes(skeleton, iter(named))
        self._described[structure] = described
        return described

    def _kind(self, skeleton: Hashable, sizes: Sequence[int]) -> _Kind:
        kind = self._kinds.get(skeleton)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                plain = (s for s, k in self._kinds.items() if not any(k.varies))
                del self._kinds[next(plain, next(iter(self._kinds)))]
            together = _numbered(sizes)
            kind = _Kind(together=together, first_met=[{} for _ in sizes], ranges=[(n, n) for n in sizes])
            self._kinds[skeleton] = kind
        return kind

    def text(self, described: Hashable) -> str:
        """What varies in a family, with the sizes met so far; empty for other descriptions.

        >>> families.text(signature.batch)  # doctest: +SKIP
        'n0 = dimension 1 of batch.0 and batch.1: 17 to 64'
        """
        kind = self._kinds.get(_without_sizes(described, [])) if is_family(described) else None
        if kind is None:
            return ""
        places: dict[str, dict[int, list[str]]] = {}
        ranges: dict[str, tuple[int, int]] = {}
        positions = [(path, dim) for path, shape in shapes_in(described) for dim in range(len(shape))]
        for (path, dim), symbol, span in zip(positions, kind.symbols, kind.ranges, strict=True):
            if symbol is not None:
                places.setdefault(symbol, {}).setdefault(dim, []).append(path)
                ranges[symbol] = span
        return "; ".join(f"{s} = {_places(p)}: {ranges[s][0]} to {ranges[s][1]}" for s, p in places.items())


def _places(paths_by_dim: dict[int, list[str]]) -> str:
    return ", ".join(f"dimension {dim} of {' and '.join(paths)}" for dim, paths in paths_by_dim.items())


def differ_in_sizes_only(one: Hashable, other: Hashable) -> bool:
    """Whether two described batches have the same structure and dtypes."""
    return _without_sizes(one, []) == _without_sizes(other, [])


def is_family(described: Hashable) -> bool:
    """Whether a described batch holds symbols."""
    return any(isinstance(shape, FamilyShape) for _, shape in shapes_in(described))


def _without_sizes(described: Any, sizes: list[int]) -> Hashable:
    if is_strided(described):
        name, shape, *facts, strides = described
        sizes.extend(shape)
        order = strides if isinstance(shape, FamilyShape) else _stride_order(shape, strides)
        return (name, len(shape), *facts, order)
    if isinstance(described, Member):
        return Member(described.name, _without_sizes(described.described, sizes))
    if isinstance(described, tuple):
        return tuple(_without_sizes(item, sizes) for item in described)
    return described  # type: ignore[no-any-return]


def _with_sizes(skeleton: Any, sizes: Iterator[Any]) -> Hashable:
    if isinstance(skeleton, Member):
        return Member(skeleton.name, _with_sizes(skeleton.described, sizes))
    if not isinstance(skeleton, tuple):
        return skeleton  # type: ignore[no-any-return]
    if len(skeleton) == 6 and skeleton[0] == "Tensor" and isinstance(skeleton[1], int):
        return (skeleton[0], FamilyShape(next(sizes) for _ in range(skeleton[1])), *skeleton[2:])
    return tuple(_with_sizes(item, sizes) for item in skeleton)


def _stride_order(shape: Sequence[int], strides: Any) -> Hashable:
    """How a tensor lies in memory, told without its sizes where it is a dense one (``channels_last``)."""
    if strides == "contiguous":
        return "contiguous"
    order = sorted(range(len(shape)), key=lambda i: strides[i], reverse=True)
    dense = all(
        strides[i] == math.prod(shape[j] for j in order[place + 1 :]) for place, i in enumerate(order)
    )
    return ("order", *order) if dense else tuple(strides)
