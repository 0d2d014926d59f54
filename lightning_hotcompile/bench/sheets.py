"""The tables for people: records as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hotcompile.bench.answers import rule_of_thumb, shown_ratio, shown_steps
from lightning_hotcompile.bench.measurement import OK
from lightning_hotcompile.bench.records import Record, shown_memory

TEXT = ("row", "arm", "status", "note")
"""Columns of text; all others are set to the right."""


def overview(records: Sequence[Record]) -> list[dict[str, str]]:
    """The columns for people, as text; a column that nobody has is left out."""
    rows = [
        {
            "row": r["row"],
            "arm": r["arm"],
            "status": r["status"],
            **{f"{p} ms": _spread(r, p) for p in ("forward", "backward", "optimizer", "total")},
            "of eager": shown_ratio(r) if r.get("speedup") is not None else "",
            "verdict": r.get("verdict") or "",
            "break-even": _break_even(r),
            "compile_s": _number(r.get("compile_s"), ".1f"),
            "graphs": _number(r.get("graphs"), "d"),
            "breaks": _number(r.get("graph_breaks"), "d"),
            "parity": r.get("parity") or "",
            "peak memory": shown_memory(r) if r["status"] == OK else "",
            "note": r.get("note") or "",
        }
        for r in records
    ]
    return [{name: row[name] for name in row if any(other[name] for other in rows)} for row in rows]


def _spread(record: Mapping[str, Any], name: str) -> str:
    median = record.get(f"{name}_median_ms")
    return "" if median is None else f"{median:.3g} (IQR {record[f'{name}_iqr_ms']:.2g})"


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _break_even(record: Mapping[str, Any]) -> str:
    if not record.get("compiled") or record.get("speedup") is None:
        return ""
    steps = record.get("break_even_steps")
    return "never" if steps is None else f"{steps:,} steps"


def side_by_side(records: Sequence[Record]) -> list[dict[str, str]]:
    """One line for each row, one column for each arm; what has no time has its status."""
    arms = list(dict.fromkeys(r["arm"] for r in records))
    by_place = {(r["row"], r["arm"]): r for r in records}
    rows = dict.fromkeys(r["row"] for r in records)
    return [{"row": row, **{arm: _cell(by_place.get((row, arm))) for arm in arms}} for row in rows]


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    median = record.get("total_median_ms")
    return str(record["status"]) if median is None else f"{median:.3g}"


def run_of_steps(records: Sequence[Record]) -> list[dict[str, str]]:
    """Warm-up, steady step, total, per iteration, break-even and verdict."""
    return [
        {
            "row": r["row"],
            "arm": r["arm"],
            "warm-up s": f"{r['warmup_s']:.2f}",
            "steady ms": f"{r['total_median_ms']:.3g}",
            "total s": f"{r['total_100_steps_s']:.2f}",
            "per iteration ms": f"{r['per_iteration_ms']:.3g}",
            "break-even": _break_even(r),
            "verdict": r.get("verdict") or "",
        }
        for r in records
        if r.get("total_100_steps_s") is not None
    ]


def thumb(records: Sequence[Record]) -> list[dict[str, str]]:
    """When to compile, by the length of an eager step."""
    return [
        {
            "eager step": line["eager_step"],
            "measured": str(line["measured"]),
            "faster": str(line["paid"]),
            "median ratio": f"{line['median_speedup']:.2f}x",
            "median compile": f"{line['median_compile_s']:.1f} s",
            "compile if you run more than": _how_long(line),
        }
        for line in rule_of_thumb(records)
    ]


def _how_long(line: Mapping[str, Any]) -> str:
    if not line["paid"]:
        return "never"
    seldom = 2 * line["paid"] < line["measured"]
    return f"{shown_steps(line)}{'; most were not faster' if seldom else ''}"
