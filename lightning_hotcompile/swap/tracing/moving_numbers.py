"""Python numbers that change and that Dynamo takes for constants: each step would be compiled anew.

Dynamo takes a number as an input once it has changed. Where an operation needs a plain one (the rate of
a dropout) it guards on its value all the same, and on some of an optimizer's settings. Up to its limit of 8
that is a compile in each step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.past_compiles import code_of, past_compiles, reason_of, running_compile

_EQUALS = re.compile(r"(?P<what>\S.*?) == \(?-?(\d+\.\d|\d+e[-+]|inf|nan)")
MOVES = "a number that is a constant of the code has another value each time"
_COMMENT = "#"
"""After the guard comes the user's line of code, as a comment."""

_MOST = 2
"""Steps with a compile for one more value of the same number, after which there will be others. Not of an
integer: what counts or is drawn may have a few values only, each with code of its own.
"""


class MovingNumbers:
    """Counts, for each region, the steps that compiled since the same number had another value.

    Several compiles in one step count once: blocks that share their code may differ in such a number.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._last_step: dict[tuple[str, str, str], int] = {}
        self._found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._of_tensors: set[str] = set()

    @staticmethod
    def newest() -> object:
        """What :meth:`look` begins after."""
        return next(reversed(past_compiles()), None)

    def look(self, region: str, step: int, newest: object) -> None:
        """A call has ended that may have compiled: what was compiled since, and why.

        Args:
            region: whose call it was.
            step: a number that is another one in each step.
            newest: before the call.
        """
        for compile_ in reversed(past_compiles()):
            if compile_ is newest:
                break
            if (reason := reason_of(compile_)) is not None:
                # a step with graph breaks has several pieces of code
                self.count(region, step, code_of(compile_.compile_id), reason)

    def count(self, region: str, step: int, frame: str, reason: str) -> None:
        """One more compile of a piece of the region's code, and its reason."""
        if (found := _EQUALS.search(reason.partition(_COMMENT)[0])) is None:
            return
        what = found["what"].split(": ")[-1]
        key = (region, frame, what)
        if self._last_step.get(key) == step:
            return
        self._last_step[key] = step
        self._counts[key] += 1
        if self._counts[key] >= _MOST:
            self._found[region][frame] = what

    def why_not_again(self, region: str) -> str | None:
        """Why no more is to be compiled for a region, or ``None``."""
        return self._why(region, self._found[region].keys() & self._of_tensors)

    def why_not_this(self, region: str, graph_module: GraphModule) -> str | None:
        """Why the frame that is traced now is left to Python, or ``None``: of one that computes numbers only.

        Its tensors are of other frames, which go with whatever it gives them.
        """
        frame = code_of(running_compile())
        if any(_is_of_tensors(node) for node in graph_module.graph.nodes):
            self.computes_tensors(frame)
        if frame in self._of_tensors:
            return None
        return self._why(region, self._found[region].keys() & {frame})

    def computes_tensors(self, frame: str) -> None:
        """A graph of this piece of code does; where none does there may be none to ask about it."""
        self._of_tensors.add(frame)

    def _why(self, region: str, frames: Collection[str]) -> str | None:
        return f"{MOVES}: {self._found[region][min(frames)]}" if frames else None


def _is_of_tensors(node: Node) -> bool:
    """Whether a node computes a tensor, and not one of a number alone, as for a call of numpy's."""
    if not node.op.startswith("call_") or node.target is torch.scalar_tensor:
        return False
    found: Any = node.meta.get("example_value")
    values = found if isinstance(found, (tuple, list)) else [found]
    return any(isinstance(value, torch.Tensor) for value in values)
