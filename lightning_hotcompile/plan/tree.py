"""A plan as a tree that a person can read."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from lightning_hotcompile.plan.planner import CompilePlan
    from lightning_hotcompile.plan.scopes import Region

_WIDTH = 100
_SHOWN = 8
_LINES = "├└│─"
_PLAIN = str.maketrans(_LINES, "|+|-")


def render_tree(plan: CompilePlan) -> str:
    """The plan as lines of text: compiled, kept eager and why, too small."""
    tree = Tree(Text(f"plan {plan.digest}: scope {plan.name} ({plan.reason})"))
    _branch(tree, "compiled", map(_region_line, plan.regions), "nothing")
    _branch(tree, "kept eager", (f"{i.name} ({i.class_name}): {i.reason}" for i in plan.islands))
    _branch(tree, "left eager", (f"{m.name} ({m.class_name}): {m.reason}" for m in plan.left_eager))
    _branch(tree, "notes", plan.notes)
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


def _branch(tree: Tree, title: str, lines: Iterable[str], otherwise: str | None = None) -> None:
    entries = list(lines) or ([otherwise] if otherwise else [])
    if not entries:
        return
    branch = tree.add(Text(title))
    for line in entries[:_SHOWN]:
        branch.add(Text(line))
    if len(entries) > _SHOWN:
        branch.add(Text(f"and {len(entries) - _SHOWN} more"))


def _region_line(region: Region) -> str:
    if region.kind == "step":
        return f"{region.class_name}.{region.name} as a whole, loss included"
    if region.kind == "group":
        size = f"{region.parameters:,} parameters each"
        return f"{region.name}: {region.class_name} x{len(region.members)} as one group, {size}"
    if region.kind == "module":
        return f"{region.name}: {region.class_name}, {region.parameters:,} parameters"
    if region.kind == "optimizer":
        return f"{region.name}: {region.class_name}.step"
    return f"{region.name}: {region.kind}"
