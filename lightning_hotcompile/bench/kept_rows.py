"""The rows of a suite of cases in one file: kept if measured in the same way, tried again if they failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hotcompile.bench.record_file import OtherResults, RecordFile, refuse_others
from lightning_hotcompile.errors import PlanError

Row = dict[str, Any]

OF_A_ROW = {"commit": ", ", "command": "; "}
"""In what rows of one file may differ, as they may be of several runs, and what stands between these."""

FAILED = "failed"
"""Phase of a row that could not be measured."""

_REFUSALS = ("NotImplementedError: ", f"{PlanError.__module__}.{PlanError.__qualname__}: ")
"""How Python prints what says that a case cannot be run in this way, by any machine at any time."""


class KeptRows:
    """What was measured into one file.

    Args:
        file: its folder is made if it is not there.
        setting: what has to be equal for rows to stand on one page.
        ways: options of the callback for each way to run a case; rows of ways that are not in here are kept.

    Raises:
        OtherResults: there are rows of another setting, or the file cannot be read.
        CannotWrite: the folder cannot be made.
    """

    def __init__(self, file: Path, setting: Mapping[str, Any], ways: Mapping[str, Mapping[str, Any]]) -> None:
        ways = json.loads(json.dumps(ways))
        self._file = RecordFile(file, setting)
        found = self._file.read()
        try:
            there = found.get("ways", {})
            self._rows = {(row["case"], row["plan"]): row for row in _rows_in(found)}
        except (AttributeError, KeyError, TypeError) as error:
            raise OtherResults(
                f"{file} has rows that this version cannot read ({error!r}): take another output_dir."
            ) from None
        both = [name for name in there if name in ways]
        refuse_others(file, _of_ways(there, both), _of_ways(ways, both))
        self._ways = {**there, **ways}

    def is_done(self, case: str, way: str) -> bool:
        """Whether there is a row, and another try would not change it."""
        row = self._rows.get((case, way))
        return row is not None and (row.get("phase") != FAILED or is_impossible(row))

    def add(self, row: Row) -> None:
        """A row is finished; it takes the place of one that failed."""
        self._rows[row["case"], row["plan"]] = row

    def rows(self, order: Iterable[tuple[str, str]]) -> list[Row]:
        """All of them; those of these cases and ways last, and in their order."""
        place = {key: i for i, key in enumerate(order)}
        return [self._rows[key] for key in sorted(self._rows, key=lambda key: place.get(key, -1))]

    def write(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
        """Replace the file in one step; ``facts`` go into it for readers and are not read back."""
        self._file.write({**facts, "ways": self._ways, "rows": rows})


def is_impossible(row: Row) -> bool:
    """Whether a row failed as its case cannot be run in this way (no fused kernel for its optimizer, say)."""
    return row.get("phase") == FAILED and str(row["reason"]).startswith(_REFUSALS)


def failures(rows: Sequence[Row]) -> list[str]:
    """A section in Markdown with what ended rows that are tried again; empty if there are none."""
    lines = [
        f"- {row['case']}, {row['plan']}: {row['reason']}"
        for row in rows
        if row.get("phase") == FAILED and not is_impossible(row)
    ]
    return ["## Failed, to be tried again", "\n".join(lines)] if lines else []


def all_of(rows: Sequence[Row], name: str) -> str | None:
    """What the rows have of one of :data:`OF_A_ROW`."""
    return OF_A_ROW[name].join(dict.fromkeys(row[name] for row in rows if row[name])) or None


def _rows_in(content: Mapping[str, Any]) -> list[Row]:
    return [{**{name: content.get(name) for name in OF_A_ROW}, **row} for row in content.get("rows", ())]


def _of_ways(ways: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    return {f"options of {name}": dict(ways[name]) for name in names}
