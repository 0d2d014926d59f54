"""The source of a function, as a tree."""

from __future__ import annotations

import ast
import inspect
import types
import warnings


def parsed(code: types.CodeType) -> tuple[ast.Module, int] | None:
    """The tree of a function's source, and what its line numbers lack to those of the file.

    ``None`` where there is no source, or lines that are no statement by themselves (a lambda). A warning
    about the source (of an escape in a docstring) was told when it was imported, and is no error here.
    """
    try:
        lines, first = inspect.getsourcelines(code)
        # Not dedented: a comment, or a line of a string, may begin at the margin.
        above = "if True:\n" if lines[0][:1].isspace() else "\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(above + "".join(lines)), first - 2
    except Exception:  # noqa: BLE001
        return None
