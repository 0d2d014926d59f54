"""From measurements to a flat table: one record for each arm of each row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hotcompile.bench.measurement import NOT_MEASURED, OK, ArmResult, Measurement
from lightning_hotcompile.bench.rows import Row
from lightning_hotcompile.bench.workloads.workload import EAGER
from lightning_hotcompile.watch.stats import Ratio, paired_ratio, summarize

Record = dict[str, Any]

PASSES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "full_step": ("forward", "backward", "optimizer"),
}
"""What is told of each arm, by the parts of a step that it takes together."""

STEPS = 100
"""For the columns of a run of so many steps after the warm-up."""


def records_of(suite: str, row: Row, measured: Measurement) -> list[Record]:
    """One record for each arm, with its ratios to eager."""
    eager = measured.arms.get(EAGER)
    return [
        {
            **_place(suite, row),
            "arm": name,
            "compiled": arm.compiled,
            "status": arm.status,
            "reason": arm.reason,
            **_figures(arm, eager if measured.paired and name != EAGER else None),
            **_compiling(arm),
            **arm.extra,
            **measured.facts,
            "parameters": measured.parameters,
            "note": measured.note,
        }
        for name, arm in measured.arms.items()
    ]


def failure_of(suite: str, row: Row, status: str, reason: str) -> Record:
    """The record of a row that could not be measured at all."""
    return {**_place(suite, row), "arm": "all", "compiled": None, "status": status, "reason": reason}


def _place(suite: str, row: Row) -> Record:
    return {"suite": suite, "case": row.case, "row": row.key, **row.sizes}


def _figures(arm: ArmResult, eager: ArmResult | None) -> Record:
    """Times and ratios of an arm that is to be believed, else nothing."""
    if arm.status != OK or not arm.laps:
        return {}
    found: Record = {}
    for name, parts in PASSES.items():
        if set(parts) <= set(arm.laps):
            found.update(_times(name, together(arm, parts)))
            if eager is not None and eager.status == OK:
                found.update(_ratio(name, together(eager, parts), together(arm, parts)))
    whole = tuple(arm.laps)
    found.update(_times("total", together(arm, whole)))
    if eager is not None and eager.status == OK:
        found.update(_verdict(arm, eager, whole))
    found.update(_run_of_steps(arm, found["total_median_ms"]))
    return found


def together(arm: ArmResult, parts: Sequence[str]) -> list[float]:
    """Seconds of some parts of each step."""
    return [sum(times) for times in zip(*(arm.laps[part] for part in parts), strict=True)]


def _times(name: str, seconds: Sequence[float]) -> Record:
    summary = summarize(1e3 * s for s in seconds)
    return {
        f"{name}_mean_ms": 1e3 * statistics.fmean(seconds),
        f"{name}_std_ms": 1e3 * statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        f"{name}_median_ms": summary.median,
        f"{name}_iqr_ms": summary.iqr,
    }


def _ratio(name: str, eager: Sequence[float], other: Sequence[float]) -> Record:
    ratio = _paired(eager, other)
    if ratio is None:
        return {}
    return {f"{name}_speedup": ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def _paired(eager: Sequence[float], other: Sequence[float]) -> Ratio | None:
    pairs = min(len(eager), len(other))
    return paired_ratio(eager[:pairs], other[:pairs])


def _verdict(arm: ArmResult, eager: ArmResult, whole: Sequence[str]) -> Record:
    before, after = together(eager, whole), together(arm, whole)
    ratio = _paired(before, after)
    if ratio is None:
        return {"verdict": "too few pairs"}
    return {
        "speedup": ratio.value,
        "speedup_low": ratio.low,
        "speedup_high": ratio.high,
        "pairs": ratio.n,
        "verdict": ratio.verdict,
        "break_even_steps": break_even(arm, ratio, statistics.median(before)),
    }


def break_even(arm: ArmResult, ratio: Ratio, eager_s: float) -> int | None:
    """Steps after which compiling has paid; None where it never does, or nothing was compiled."""
    if not arm.compiled or ratio.verdict != "faster":
        return None
    return math.ceil(arm.compile_s / (eager_s * (1 - 1 / ratio.value)))


def _run_of_steps(arm: ArmResult, step_ms: float) -> Record:
    total = arm.warmup_s + STEPS * step_ms / 1e3
    return {"warmup_s": arm.warmup_s, "total_100_steps_s": total, "per_iteration_ms": 1e3 * total / STEPS}


def _compiling(arm: ArmResult) -> Record:
    memory: Record = {"peak_memory_mb": arm.peak_memory_mb}
    if not arm.compiled:
        return memory
    return {
        **memory,
        "compile_s": arm.compile_s,
        "graphs": arm.graphs,
        "graph_breaks": arm.graph_breaks,
        "recompiles": arm.recompiles,
        "compiled_ops": arm.compiled_ops,
        "runs_per_step": arm.runs_per_step,
        "parity": arm.parity,
        "parity_error": arm.parity_error,
    }


def shown_memory(record: Mapping[str, Any]) -> str:
    """Peak memory in words."""
    peak = record.get("peak_memory_mb")
    return NOT_MEASURED if peak is None else f"{peak:.3g} MB" if peak < 1000 else f"{peak:,.0f} MB"


def measured(records: Sequence[Record]) -> list[Record]:
    """Compiled arms that have a ratio to eager."""
    return [r for r in records if r.get("compiled") and r.get("speedup") is not None]
