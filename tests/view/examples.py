"""Made-up runs, and the files that they would have written."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from lightning_hotcompile.receipt.event_kinds import (
    Compiled,
    Compiling,
    Detected,
    Event,
    ParityChecked,
    PhaseChanged,
    Planned,
    SpeedUp,
)
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.report import PhaseStats, RegionProof, Report
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.captured import Captured
from lightning_hotcompile.watch.stats import Ratio, Summary

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>\"'&amp;"
"""What a module could be called to get into a page."""

TREE = """plan 3fa29c1b: scope step (the whole step as one graph)
├── compiled
│   └── Net.training_step as a whole, loss included
└── kept eager
    └── val_perplexity (Perplexity): a metric keeps its own state"""

ZERO = 1_700_000_000.0


def samples(steps: int = 320) -> tuple[StepSample, ...]:
    """10 eager steps, one that compiles, 20 in turns, the rest compiled; each tenth of these in short."""
    draw = random.Random(0)
    found, now = [], 0.0
    for step in range(1, steps + 1):
        phase = (
            "observing"
            if step <= 10
            else "flipping"
            if step == 11
            else "settling"
            if step <= 31
            else "steady"
        )
        compiled = step > 10 and (phase != "settling" or step % 4 < 2)
        ms = (19.0 if compiled else 28.0) * (1 + 0.05 * abs(draw.gauss(0, 1)))
        note = "recorded" if step == 3 else "stalled" if step == 11 else ""
        ms = 3200.0 if note == "stalled" else ms + 24.0 * (note == "recorded")
        found.append(StepSample(step, round(now, 6), round(ms, 4), phase, compiled, note))
        now += ms / 1e3 + 0.001
    return tuple(found)


def events() -> list[Event]:
    """What such a run tells."""
    steps = {s.step: ZERO + s.start_s + s.ms / 1e3 for s in samples()}

    def at(step: int, later: float = 0.0) -> dict[str, Any]:
        return {"step": step, "time": steps[step] + later}

    return [
        Detected(**at(10), signature="ab12cd34", count=10, op_sequence="linear -> relu -> sum", n_ops=42),
        Planned(**at(10, 1e-5), scope="step", reason="the whole step as one graph", regions=1, tree=TREE),
        PhaseChanged(**at(10, 2e-5), phase="flipping", reason="worth it: 300 steps are left"),
        Compiling(**at(10, 3e-5), regions=1),
        Compiled(**at(11), region="training_step", seconds=2.9, n_ops=42, cache_hit=False),
        ParityChecked(**at(11, 1e-5), region="training_step", agrees=True, error=4.5e-8, reason=""),
        PhaseChanged(**at(11, 2e-5), phase="settling", reason="compiled code ran"),
        SpeedUp(**at(31), value=1.47, low=1.38, high=1.55, n=10, verdict="faster"),
        PhaseChanged(**at(31, 1e-5), phase="steady", reason="faster: 1.47x [1.38, 1.55]"),
    ]


def report(**changed: Any) -> Report:
    """The receipt of that run."""
    values: dict[str, Any] = {
        "phase": "steady",
        "reason": "faster: 1.47x [1.38, 1.55]",
        "scope": "step",
        "plan": TREE,
        "plan_digest": "3fa29c1be077",
        "decision": "worth it: 300 steps of 28 ms are left",
        "steps": 320,
        "compile_s": 2.9,
        "stall_s": 3.17,
        "recompiles": 0,
        "graph_breaks": 0,
        "parity": "1 of 1 graphs agree with eager, largest difference 4.5e-08",
        "parity_error": 4.5e-8,
        "eager_ms": Summary(n=10, median=29.1, q1=28.4, q3=30.0),
        "compiled_ms": Summary(n=10, median=19.8, q1=19.3, q3=20.4),
        "speedup": Ratio(value=1.47, low=1.38, high=1.55, n=10, confidence=0.98),
        "break_even_step": 350,
        "saved_s": -0.21,
        "regions": (
            RegionProof(
                name="training_step",
                kind="step",
                members=("training_step",),
                graphs=1,
                runs=300,
                compile_s=2.9,
                proven=True,
            ),
        ),
        "overhead_us": math.nan,
        "wait_share": 0.05,
        "phases": (
            PhaseStats(name="observing", steps=10, median_ms=28.9, iqr_ms=1.1, total_s=0.31),
            PhaseStats(name="flipping", steps=1, median_ms=None, iqr_ms=None, total_s=3.2),
            PhaseStats(name="steady", steps=289, median_ms=19.7, iqr_ms=0.9, total_s=5.7),
        ),
        "notes": ("one step runs 42 operations: linear -> relu -> sum",),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "events": tuple(map(event_to_dict, events())),
        "samples": samples(),
    }
    return Report(**{**values, **changed})


def hostile_report() -> Report:
    """A report in which every text is an attack on the page."""
    region = RegionProof(
        name=HOSTILE, kind=HOSTILE, members=(HOSTILE, "b"), graphs=1, runs=0, compile_s=1.0,
        proven=False, note=HOSTILE,
    )  # fmt: skip
    told = [
        Planned(step=1, time=ZERO, scope=HOSTILE, reason=HOSTILE, regions=1, tree=HOSTILE),
        Compiling(step=1, time=ZERO, regions=1),
        SpeedUp(step=2, time=ZERO, value=1.5, low=1.2, high=1.7, n=9, verdict=HOSTILE),
        PhaseChanged(step=2, time=ZERO, phase=HOSTILE, reason=HOSTILE),
    ]
    return report(
        phase=HOSTILE,
        reason=HOSTILE,
        scope=HOSTILE,
        plan=HOSTILE,
        decision=HOSTILE,
        parity=HOSTILE,
        regions=(region,),
        phases=(PhaseStats(name=HOSTILE, steps=1, median_ms=1.0, iqr_ms=0.1, total_s=1.0),),
        notes=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        peak_memory_mb={HOSTILE: 1.0},
        events=tuple(map(event_to_dict, told)),
        samples=tuple(s._replace(phase=HOSTILE, note=HOSTILE) for s in samples(20)),
    )


def captured(**changed: Any) -> Captured:
    """A capture of the same training without HotCompile."""
    steps = tuple(
        StepSample(n, 0.03 * n, 30.0 if n <= 5 else 28.0, "training", False, "profiled" if n <= 5 else "")
        for n in range(1, 101)
    )
    values: dict[str, Any] = {
        "command": ("python", "train.py"),
        "device": "cpu",
        "profiled_steps": 5,
        "step_ms": 30.0,
        "compiled_share": 0.0,
        "operators_per_step": 412.0,
        "steps": steps,
    }
    return Captured(**{**values, **changed})


def write_report(folder: Path, made: Report | None = None) -> Path:
    """``report.json`` in a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text((made or report()).to_json(), encoding="utf-8")
    return folder


def write_log(file: Path, log: list[Event] | None = None) -> Path:
    """An event log; returns the file."""
    lines = [json.dumps(event_to_dict(e)) for e in (events() if log is None else log)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file
