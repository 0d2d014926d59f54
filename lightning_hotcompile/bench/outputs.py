"""The output folder of a suite: CSV, Markdown, LaTeX and a picture; its JSON is kept by the suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from lightning_hotcompile.bench import latex, sheets
from lightning_hotcompile.bench.answers import answers, name_of, shown_ratio
from lightning_hotcompile.bench.measurement import OK
from lightning_hotcompile.bench.picture import picture
from lightning_hotcompile.bench.record_file import writing
from lightning_hotcompile.bench.records import STEPS, Record
from lightning_hotcompile.errors import ConfigError, near_names

HOW = f"""\
Each row has a process and a folder for compiled code of its own. What the toolchain itself needs once on a
machine (probes, precompiled headers) and once in a process (the compiler's import) was there before a row.
All arms of a row use the same weights and inputs and are run in turns (E C C E), after a warm-up, with the
device waited for. Times are medians with their interquartile range. The ratio is the median of eager time /
other time over neighbouring steps, with the 95% interval of the sign test; above 1 the other arm is faster.
`compile_s` is all compiling, the backward included. Peak memory is, on a CPU, what one step held at most on
top of weights, inputs and optimizer state; on a GPU all that was allocated. Break-even is the number of
steps after which a faster arm has saved its compile time. The columns for {STEPS} steps add warm-up and
{STEPS} median steps. What is compiled is compiled as the callback does it, with Inductor's own random
numbers: graphs are called from C++, and each call is counted. Each graph was compared with eager on its first
real inputs, forward and gradients. A row whose compiled code did not run in each step, that hit the recompile
limit, that was compiled again while it was measured, or that is not right, is INVALID."""


def check_formats(formats: Sequence[str]) -> None:
    """Refuse an unknown format.

    Raises:
        ConfigError: the message lists those that there are.
    """
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"format={name!r} is unknown: use {', '.join(FORMATS)}{near_names(str(name), FORMATS)}."
            )


def write(
    folder: Path, name: str, records: Sequence[Record], facts: Mapping[str, Any], formats: Sequence[str]
) -> None:
    """All files that were asked for; without a record none.

    Raises:
        CannotWrite: the folder does not take them.
    """
    if records:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for wanted in formats:
                FORMATS[wanted](folder / name, records, facts)


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """All columns; what was not measured is empty."""
    return pd.DataFrame(list(records))


def _csv(file: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    frame(records).to_csv(file.with_suffix(".csv"), index=False)


def _markdown(file: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    file.with_suffix(".md").write_text(page(file.name, records, facts), encoding="utf-8")


def _latex(file: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    rows = sheets.overview(records)
    head = list(rows[0])
    text = latex.table(
        f"Suite {file.name}: {facts.get('machine', '')}",
        head,
        [list(row.values()) for row in rows],
        numbers=[column not in sheets.TEXT for column in head],
    )
    file.with_suffix(".tex").write_text(text, encoding="utf-8")


def _png(file: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    if any(r.get("speedup") is not None for r in records):
        picture(file.name, records).savefig(file.with_suffix(".png"), dpi=120)


def _kept_already(file: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    """The suite's own file, from which it goes on."""


FORMATS: Mapping[str, Callable[[Path, Sequence[Record], Mapping[str, Any]], None]] = {
    "csv": _csv,
    "json": _kept_already,
    "markdown": _markdown,
    "latex": _latex,
    "png": _png,
}
"""All formats; the JSON is there in any case."""


def page(name: str, records: Sequence[Record], facts: Mapping[str, Any]) -> str:
    """The Markdown page: answers first, then the tables."""
    sections = [f"# Suite {name}", *_notes(records)]
    for question, lines in answers(records).items():
        sections += [f"## {question}", "\n".join(f"- {line}" for line in lines)]
    sections += _table("Rule of thumb", sheets.thumb(records))
    sections += _table("Measurements", sheets.overview(records))
    sections += _table("Side by side: milliseconds of a step (median)", sheets.side_by_side(records))
    sections += _table(f"A run of {STEPS} steps", sheets.run_of_steps(records))
    sections += ["## How it was measured", HOW, *_origin(facts)]
    return "\n\n".join(sections) + "\n"


def _notes(records: Sequence[Record]) -> list[str]:
    return [f"**{note}**" for note in dict.fromkeys(r.get("note") for r in records) if note]


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"## {title}", pd.DataFrame(list(rows)).to_markdown(index=False, disable_numparse=True)]


def _origin(facts: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    named = {**facts, "versions": versions, "command": f"`{facts.get('command')}`"}
    names = ("command", "date", "commit", "machine", "device", "versions", "threads", "toolchain_s")
    return ["## Where this comes from", "\n".join(f"- {n}: {named[n]}" for n in names if named.get(n))]


def words(record: Record) -> str:
    """One line for the console."""
    name = name_of(record)
    if record["status"] != OK:
        return f"{name}: {record['status']}: {record['reason']}"
    if record.get("total_median_ms") is None:
        return f"{name}: no time"
    ratio = f", {shown_ratio(record)} of eager" if record.get("speedup") is not None else ""
    compiled = f", compiled in {record['compile_s']:.1f} s" if record.get("compiled") else ""
    return f"{name}: {record['total_median_ms']:.3g} ms{ratio}{compiled}"
