"""A table for LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hotcompile.view.latex import escaped


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[bool]) -> str:
    r"""A ``longtable``, which may be longer than a page; ``\usepackage{longtable,booktabs}`` is needed.

    Args:
        title: of the table.
        head: names of the columns.
        rows: cells.
        numbers: which columns are set to the right.
    """
    columns = "".join("r" if right else "l" for right in numbers)
    lines = [
        "% needs \\usepackage{longtable,booktabs}",
        rf"\begin{{longtable}}{{{columns}}}",
        rf"\caption{{{escaped(title)}}} \\",
        r"\toprule",
        _line(head),
        r"\midrule",
        r"\endhead",
        r"\bottomrule",
        r"\endfoot",
        *(_line(row) for row in rows),
        r"\end{longtable}",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"
