"""Lines of text as a tree that a person can read."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

_WIDTH = 100
_SHOWN = 8
_LINES = "├└│─"
_PLAIN = str.maketrans(_LINES, "|+|-")


def render_tree(title: str, branches: Mapping[str, Iterable[str]]) -> str:
    """A tree of two levels; a branch without lines is left out, and of many lines only eight are shown."""
    tree = Tree(Text(title))
    for name, lines in branches.items():
        if entries := list(lines):
            _grow(tree.add(Text(name)), entries)
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, color_system=None, legacy_windows=False, force_jupyter=False).print(
        tree
    )
    return printable("\n".join(line.rstrip() for line in stream.getvalue().splitlines()))


def printable(text: str) -> str:
    """Text with the lines of trees and rules as this process's output has them: a file's may be cp1252."""
    try:
        _LINES.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_PLAIN)
    return text


def _grow(branch: Tree, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        branch.add(Text(line))
    if len(lines) > _SHOWN:
        branch.add(Text(f"and {len(lines) - _SHOWN} more"))
