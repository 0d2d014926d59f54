"""What a capture of a script has measured, as it stands in its ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.restoring import restored

MARK = "hotcompile capture"
"""How the format begins, whatever its version."""

FORMAT = f"{MARK} 1"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Numbers of a captured training; None where something could not be counted."""

    format: str = FORMAT
    command: tuple[str, ...] = ()
    """The script as it was started."""

    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    """Where it was trained: ``cpu``, ``cuda``."""

    profiled_steps: int = 0
    """Steps that the profiler has seen whole."""

    step_ms: float | None = None
    """Median of the profiled steps in milliseconds; the profiler slows them down."""

    compiled_share: float | None = None
    """Share of the profiled steps' time, 0 to 1, inside compiled regions, on the host."""

    operators_per_step: float | None = None
    """Calls of tensor operations by Python, autograd and the optimizer; not what these call themselves."""

    launches_per_step: float | None = None
    """Kernels that the host launched on the device; None without a device."""

    notes: tuple[str, ...] = ()
    steps: tuple[StepSample, ...] = ()
    """Single steps of the whole training, ``profiled`` ones noted as such."""


def is_capture(record: object) -> bool:
    """Whether this JSON is a capture's."""
    return isinstance(record, Mapping) and str(record.get("format", "")).startswith(MARK)


def captured_from_dict(record: Mapping[str, Any]) -> tuple[Captured, list[str]]:
    """The capture of such a JSON, and a sentence for each row that was left out.

    Raises:
        ValueError: a value is of another type, or it comes from a newer version.
    """
    if record.get("format") != FORMAT:
        raise ValueError(f"format={record.get('format')!r} is not known, only {FORMAT!r}: capture it again")
    problems: list[str] = []
    return restored(Captured, record, problems), problems
