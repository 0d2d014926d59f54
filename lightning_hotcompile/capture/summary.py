"""The file ``summary.json`` of a capture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from lightning_hotcompile.capture.analysis import analyse
from lightning_hotcompile.capture.order import SUMMARY_FILE, TRACE_FILE
from lightning_hotcompile.receipt.samples import json_with_rows
from lightning_hotcompile.view.captured import Captured, captured_from_dict


def to_json(captured: Captured) -> str:
    """A capture as JSON, one line for each step."""
    return json_with_rows(asdict(captured), "steps")


def complete(folder: Path) -> Captured | None:
    """Put into the summary what the trace says; None if the script has not captured anything.

    Raises:
        ValueError: a file was cut off.
        OSError: a file cannot be read or written.
    """
    file, trace = folder / SUMMARY_FILE, folder / TRACE_FILE
    if not file.is_file() or not file.stat().st_size:
        return None
    captured, _ = captured_from_dict(json.loads(file.read_bytes()))
    if trace.is_file():
        found = analyse(json.loads(trace.read_bytes())["traceEvents"])
        captured = replace(
            captured,
            step_ms=found.step_ms,
            compiled_share=found.compiled_share,
            operators_per_step=found.operators_per_step,
            launches_per_step=found.launches_per_step,
        )
        file.write_text(to_json(captured), encoding="utf-8")
    return captured
