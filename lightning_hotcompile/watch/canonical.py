"""The canonical form of a recorded step: a dependency graph without names or addresses."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

# Part of what is hashed: digests made by different rules must never be equal.
_RULES = "opgraph 1"

# Between what an operation reads and what it makes.
MAKES = "->"

_SHORT_NAMES = {"addmm": "linear", "mm": "matmul", "bmm": "matmul"}
# Views and copies, which a reader of the sequence does not want to see.
_PLUMBING = frozenset(
    {"t", "view", "_unsafe_view", "detach", "alias", "transpose", "permute", "expand", "unsqueeze", "squeeze"}
    | {"select", "slice", "split", "unbind", "reshape", "clone", "as_strided", "empty", "lift_fresh"}
    | {"_record_function_enter_new", "_record_function_exit"}
    | {"_to_copy"}
)


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """What one step did."""

    digest: str
    """Hexadecimal name of the graph, the same in every process."""

    ops: tuple[str, ...]
    """Names of the operations in order, for example ``aten.mm.default``."""

    elements: tuple[int, ...]
    """How many elements of tensors each operation reads and makes; what it changes in place counts once."""

    sizes: frozenset[int]
    """Of dimensions, of all tensors that were read or made."""

    @property
    def n_ops(self) -> int:
        """How many operations ran."""
        return len(self.ops)

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each operation ran, the most frequent first."""
        return dict(Counter(self.ops).most_common())

    @property
    def elements_by_op(self) -> Mapping[str, int]:
        """How many elements of tensors the operations of each name read and make."""
        found: Counter[str] = Counter()
        for op, elements in zip(self.ops, self.elements, strict=True):
            found[op] += elements
        return dict(found)

    def sequence_text(self, limit: int = 12) -> str:
        """The first operations for a reader: ``linear -> relu -> sum``.

        Views and copies are left out, repeats are counted; ``limit`` is the number of entries shown.
        """
        names = [name for name in map(_short_name, self.ops) if name not in _PLUMBING]
        runs = [(name, len(list(group))) for name, group in groupby(names)]
        shown = [name if n == 1 else f"{name} x{n}" for name, n in runs[:limit]]
        return " -> ".join(shown + [f"... ({self.n_ops} ops)"] * (len(runs) > limit))


def _short_name(op: str) -> str:
    name = op.split(".")[1] if op.count(".") else op
    bare = name.rstrip("_").removeprefix("native_")
    return _SHORT_NAMES.get(bare, bare)


class Canonical:
    """Turns one trace into text in which tensors and storages are numbered in order of first use.

    A trace has one list of tokens for each operation: the operator, what it reads, ``MAKES``, what it makes.
    A tensor is the number of its storage or a place (see ``SeenStorages``); the rest goes in by its ``str``.
    """

    def __init__(self) -> None:
        # A tensor is found by its place, or by its storage's number alone while that has no views.
        self._nodes: dict[Any, int] = {}
        self._storages: dict[int, int] = {}
        self._sizes: list[int] = []
        self._elements: list[int] = []
        self._geometries: dict[tuple[Any, ...], str] = {}
        # By id, because hashing an operator is slow; the trace keeps the operators alive.
        self._names: dict[int, str] = {}

    def graph(self, trace: list[list[Any]]) -> OpGraph:
        """The graph of a whole trace."""
        lines = [_RULES, *map(self._line, trace)]
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
        names = tuple(self._names[id(tokens[0])] for tokens in trace)
        sizes = frozenset(size for shape, *_ in self._geometries for size in shape)
        return OpGraph(digest=digest, ops=names, elements=tuple(self._elements), sizes=sizes)

    def _line(self, tokens: list[Any]) -> str:
        func = tokens[0]
        words = [self._names.get(id(func)) or self._names.setdefault(id(func), str(func))]
        nodes, makes, elements = self._nodes, False, 0
        for token in tokens[1:]:
            kind = token.__class__
            if kind is int:
                node = nodes[token]
                words.append(f"%{node}")
            elif kind is not tuple:
                makes = makes or token is MAKES
                words.append(str(token))
                continue
            else:
                known = None if makes else nodes.get(token[:4])
                node = len(self._sizes) if known is None else known
                words.append(self._new_node(token) if known is None else f"%{known}")
            elements += self._sizes[node]
        self._elements.append(elements)
        return " ".join(words)

    def _new_node(self, token: tuple[Any, ...]) -> str:
        node = len(self._sizes)
        self._nodes[token[:4]] = self._nodes[token[0]] = node
        self._sizes.append(math.prod(max(0, size) for size in token[2]))  # none of a symbolic shape
        storage = self._storages.setdefault(token[0], len(self._storages))
        geometry = token[2:]
        text = self._geometries.get(geometry)
        if text is None:
            text = self._geometries[geometry] = _geometry_text(*geometry)
        return f"%{node}@{storage}:{text}"


def _geometry_text(shape: tuple[int, ...], stride: tuple[int, ...], *kinds: object) -> str:
    # The stride of a dimension of one element means nothing and is not always the same.
    strides = [s if n > 1 else 0 for n, s in zip(shape, stride, strict=False)]
    return f"{list(shape)}{strides}{':'.join(map(str, kinds))}".replace(" ", "")
