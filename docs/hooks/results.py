"""MkDocs hook: the committed results of the benchmarks as pages, and their answers where they are asked for.

A page asks with a line ``<!-- results: NAME -->``, where NAME is a folder in ``recipes/results``, or ``rest``
for all folders that the page does not name. Nothing is copied by hand, so that no number can drift.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"
LINK_BESIDE = re.compile(r"\]\(([\w.-]+)\)")
MARK = re.compile(r"^<!-- results: ([\w.-]+) -->$", re.MULTILINE)
REST = "rest"
NONE_YET = "*There are no results of this suite in the repository yet.*"

DETAILS = ("Measurements", "Above the goal", "Steady step", "How it was measured", "Where this comes from")
"""The first of these headings ends what is shown in place; the page of the results has all of it."""


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each Markdown file in the results, and what such pages show or link to."""
    for path in _files(".md"):
        files.append(File.generated(config, _uri(path), content=page_of(path)))
    for suffix in (".png", ".json", ".csv"):
        for path in _files(suffix):
            files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put the answers of a suite in place of each mark."""
    named = set(MARK.findall(markdown))
    others = [name for name in _suites() if name not in named]

    def answers(mark: re.Match[str]) -> str:
        if mark[1] != REST:
            return shown(mark[1])
        return "\n\n".join(f"## `{name}`\n\n{shown(name)}" for name in others)

    return MARK.sub(answers, markdown)


def shown(suite: str) -> str:
    """The answers of one suite, its picture, and a link to all of its numbers."""
    paths = [path for path in _files(".md") if path.parent.name == suite]
    return "\n\n".join(_shown(path) for path in paths) or NONE_YET


def page_of(path: Path) -> str:
    """A page of results as it was committed, with the picture beside it."""
    title, _, body = path.read_text(encoding="utf-8").partition("\n")
    return f"{title}\n\n{_picture(path, path.parent)}{body.lstrip()}"


def _shown(path: Path) -> str:
    _, _, body = path.read_text(encoding="utf-8").partition("\n")
    sections = re.split(r"^(?=## )", body, flags=re.MULTILINE)
    kept = []
    for section in sections:
        heading = re.match(r"## (.*)\n", section)
        if heading and heading[1].startswith(DETAILS):
            break
        linked = LINK_BESIDE.sub(rf"]({_uri(path.parent)}/\1)", section)
        kept.append(re.sub(r"^## (.*)$", r"**\1**", linked, flags=re.MULTILINE).strip())
    link = f"[All numbers of `{path.stem}`, and where they come from]({_uri(path)})"
    return "\n\n".join(filter(None, [*kept, _picture(path, RESULTS.parent).strip(), link]))


def _picture(path: Path, seen_from: Path) -> str:
    if not path.with_suffix(".png").is_file():
        return ""
    return f"![Picture of the results of {path.stem}]({_relative(path.with_suffix('.png'), seen_from)})\n\n"


def _suites() -> list[str]:
    return sorted({path.parent.name for path in _files(".md")})


def _files(suffix: str) -> Iterator[Path]:
    return iter(sorted(RESULTS.glob(f"*/*{suffix}")))


def _uri(path: Path) -> str:
    return _relative(path, RESULTS.parent)


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
