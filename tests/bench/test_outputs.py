"""The files of a suite."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lightning_hotcompile.bench.latex import escaped, table
from lightning_hotcompile.bench.outputs import check_formats, page, write
from lightning_hotcompile.bench.records import Record, failure_of, records_of
from lightning_hotcompile.bench.rows import rows_of
from lightning_hotcompile.bench.workloads.surgical import STAND_IN
from lightning_hotcompile.errors import ConfigError
from tests.bench.suite_examples import measured

FACTS = {"machine": "a CPU", "command": "benchmark suite=s", "commit": "abc", "versions": {"torch": "2"}}


def records(note: str = "") -> list[Record]:
    first, second = rows_of([{"case": "simple", "batch_size": 8, "width": [16, 32]}])
    found = measured()
    found.note = note
    return [*records_of("s", first, found), failure_of("s", second, "ERROR", "50% of a_b & {c}")]


def test_only_the_formats_that_were_asked_for_are_written(tmp_path: Path) -> None:
    write(tmp_path, "s", records(), FACTS, ["csv", "latex"])
    assert {path.name for path in tmp_path.iterdir()} == {"s.csv", "s.tex"}
    write(tmp_path, "s", records(), FACTS, ["csv", "json", "markdown", "latex", "png"])
    assert {path.name for path in tmp_path.iterdir()} == {"s.csv", "s.md", "s.tex", "s.png"}
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"format='markdwon' is unknown.*did you mean 'markdown'"):
        check_formats(["markdwon"])


def test_the_csv_has_a_line_for_each_arm_and_empty_cells_for_what_was_not_measured(tmp_path: Path) -> None:
    write(tmp_path, "s", records(), FACTS, ["csv"])
    found = pd.read_csv(tmp_path / "s.csv")
    assert list(found["arm"]) == ["eager", "compiled", "all"]
    assert list(found["status"]) == ["ok", "ok", "ERROR"]
    assert found["peak_memory_mb"].isna().all()
    assert found["speedup"].tolist()[1] == pytest.approx(2.0)


def test_the_page_has_answers_tables_and_where_it_comes_from() -> None:
    text = page("s", records(), FACTS)
    for words in (
        "## Where compiling helps and where it hurts",
        "## Rule of thumb",
        "## Side by side",
        "4,000 steps",
        "2.00x [2.00, 2.00]",
        "- command: `benchmark suite=s`",
        "- commit: abc",
        "- machine: a CPU",
        "not measured",
        "simple width=32 (all): ERROR",
    ):
        assert words in text


def test_a_stand_in_is_named_in_every_file(tmp_path: Path) -> None:
    write(tmp_path, "s", records(STAND_IN), FACTS, ["csv", "markdown", "latex"])
    for name in ("s.csv", "s.md"):
        assert STAND_IN in (tmp_path / name).read_text("utf-8")
    assert escaped(STAND_IN) in (tmp_path / "s.tex").read_text("utf-8")


def test_latex_is_escaped_and_every_line_has_all_its_cells() -> None:
    assert escaped(r"50% of a_b & {c} \d #1 $2 ~ ^") == (
        r"50\% of a\_b \& \{c\} \textbackslash{}d \#1 \$2 \textasciitilde{} \textasciicircum{}"
    )
    text = table("a & b", ["x", "y"], [["1_0", "2"], ["", "3%"]], numbers=[False, True])
    assert r"\begin{longtable}{lr}" in text
    assert r"\caption{a \& b} \\" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\") and "caption" not in line]
    assert body == [r"x & y \\", r"1\_0 & 2 \\", r" & 3\% \\"]


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    write(tmp_path, "s", [], FACTS, ["csv", "markdown", "latex", "png"])
    assert list(tmp_path.iterdir()) == []
