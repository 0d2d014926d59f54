"""What a suite has measured so far: kept after each row, so that an interrupt loses nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hotcompile.bench import outputs
from lightning_hotcompile.bench.answers import answers, rule_of_thumb
from lightning_hotcompile.bench.measurement import FINDINGS, Measurement
from lightning_hotcompile.bench.record_file import OtherResults, RecordFile
from lightning_hotcompile.bench.records import Record, failure_of, records_of
from lightning_hotcompile.bench.rows import Row


class Kept:
    """The rows of one suite in one file, and those that could not be measured.

    Raises:
        OtherResults: the file has results of another setting, or cannot be read.
    """

    def __init__(self, file: RecordFile, suite: str) -> None:
        self._file, self._suite = file, suite
        found = file.read()
        try:
            self._rows = _rows_in(found)
            self._failures = _failures_in(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OtherResults(
                f"{file.file} has rows that this version cannot read ({error!r}): take another output_dir."
            ) from None
        self.facts: dict[str, Any] = {k: found[k] for k in ("toolchain_s", "row_s") if k in found}

    def is_done(self, row: Row) -> bool:
        """Whether a row was measured, at the same sizes, and another try would not change it."""
        found = self._rows.get(row.key)
        if found is None or found[0] != row:
            return False
        return all(arm.status in FINDINGS for arm in found[1].arms.values())

    def add(self, row: Row, measured: Measurement) -> None:
        """A row is finished."""
        self._rows[row.key] = (row, measured)
        self._failures.pop(row.key, None)

    def add_failure(self, row: Row, status: str, reason: str) -> None:
        """A row could not be measured; the next run into this folder tries again."""
        self._failures[row.key] = (row, status, reason)

    def records_for(self, row: Row) -> list[Record]:
        """What is known about one row."""
        name = self._suite
        if row.key in self._failures:
            _, status, reason = self._failures[row.key]
            return [failure_of(name, row, status, reason)]
        return records_of(name, *self._rows[row.key]) if row.key in self._rows else []

    def records(self) -> list[Record]:
        """Of all rows, those of an earlier command too."""
        rows = {key: row for key, (row, _) in self._rows.items()}
        rows |= {key: row for key, (row, _, _) in self._failures.items()}
        return [record for row in rows.values() for record in self.records_for(row)]

    def write(self, facts: Mapping[str, Any], formats: Sequence[str]) -> list[Record]:
        """All files; the JSON in any case."""
        records = self.records()
        told = {**facts, **self.facts}
        self._file.write(
            {
                **told,
                "suite": self._suite,
                "answers": answers(records),
                "rule_of_thumb": rule_of_thumb(records),
                "failures": [
                    {"row": _plain(row), "status": status, "reason": reason}
                    for row, status, reason in self._failures.values()
                ],
                "records": records,
                "rows": [
                    {"row": _plain(row), "measured": measured.to_dict()}
                    for row, measured in self._rows.values()
                ],
            }
        )
        everything = {**self._file.setting, **told}
        outputs.write(self._file.file.parent, self._suite, records, everything, formats)
        return records


def _rows_in(content: Mapping[str, Any]) -> dict[str, tuple[Row, Measurement]]:
    return {
        entry["row"]["key"]: (_row(entry["row"]), Measurement.from_dict(entry["measured"]))
        for entry in content.get("rows", ())
    }


def _failures_in(content: Mapping[str, Any]) -> dict[str, tuple[Row, str, str]]:
    return {
        entry["row"]["key"]: (_row(entry["row"]), entry["status"], entry["reason"])
        for entry in content.get("failures", ())
    }


def _plain(row: Row) -> dict[str, Any]:
    return {"key": row.key, **dataclasses.asdict(row)}


def _row(data: Mapping[str, Any]) -> Row:
    return Row(case=data["case"], workload=data["workload"], sizes=data["sizes"], swept=tuple(data["swept"]))
