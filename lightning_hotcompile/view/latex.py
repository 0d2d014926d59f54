"""The receipt as a piece of LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.rendering import Section, facts, sections
from lightning_hotcompile.receipt.report import Report

_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "├": "|",
        "└": "+",
        "─": "-",
        "│": "|",
    }
)


def report_to_latex(report: Report) -> str:
    """Headline, facts, tables and notes, to be put into a document of yours; needs no package."""
    head = Section(title="hotcompile receipt", columns=("what", "value"), rows=tuple(facts(report)))
    blocks = [
        f"\\paragraph{{hotcompile receipt}} {escaped(wording.headline(report))}",
        _table(head, "lp{10cm}"),
    ]
    for section in sections(report):
        columns = "".join("r" if column.startswith("#") else "l" for column in section.columns)
        blocks += [
            f"\\paragraph{{{escaped(section.title)}}}",
            _table(section, columns),
            *_items(section.remarks),
        ]
    blocks += _items(report.notes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return "\n\n".join([*blocks, *([f"{{\\small {escaped(versions)}}}"] if versions else [])]) + "\n"


def _table(section: Section, columns: str) -> str:
    head = " & ".join(escaped(column.removeprefix("#")) for column in section.columns)
    rows = [" & ".join(map(escaped, row)) + r" \\" for row in section.rows]
    body = "\n".join([r"\hline", rf"{head} \\", r"\hline", *rows, r"\hline"])
    return f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}"


def _items(sentences: Sequence[str]) -> list[str]:
    items = "\n".join(f"\\item {escaped(sentence)}" for sentence in sentences)
    return [f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}"] if items else []


def escaped(text: str) -> str:
    r"""Text as LaTeX prints it, on one line.

    >>> print(escaped("50% of d_model"))
    50\% of d\_model
    """
    return " ".join(text.split()).translate(_ESCAPES)
