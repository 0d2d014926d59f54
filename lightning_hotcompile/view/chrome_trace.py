"""A run as a trace that Perfetto and chrome://tracing open (Google's Trace Event Format)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_hotcompile.receipt.event_kinds import Compiled, Event, PhaseChanged
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.run import Run
from lightning_hotcompile.view.timeline import Band, bands_of

_PID = 1
_TRACKS = {"phases": 1, "steps": 2, "compiling": 3, "events": 4}

_Record = dict[str, Any]


def trace_of(run: Run) -> _Record:
    """The trace as JSON types: slices of phases, steps and compiles, a counter ``step_ms``, and the events.

    Time 0 is the beginning of the first step. Events have a clock of their own: the two are laid side by
    side so that no event comes before the end of the step that it follows.
    """
    samples, events = run.samples, [e for e in run.events if math.isfinite(e.time)]
    zero = _zero_of_events(samples, events)
    records = [
        *_names(run.name),
        *_phases(samples, events, zero),
        *(_slice("steps", f"step {s.step}", s.start_s, s.ms / 1e3, _facts(s)) for s in samples),
        *(_counter(s) for s in samples),
        *_compiles(events, zero),
        *(_instant(e, e.time - zero) for e in events),
    ]
    return {
        "traceEvents": records,
        "displayTimeUnit": "ms",
        "otherData": {"source": "lightning_hotcompile", "run": run.name},
    }


def trace_json(run: Run) -> str:
    """The trace, one record in each line."""
    trace = trace_of(run)
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in trace.pop("traceEvents"))
    return f'{{"traceEvents": [\n{lines}\n], {json.dumps(trace)[1:]}\n'


def _zero_of_events(samples: Sequence[StepSample], events: Sequence[Event]) -> float:
    """The events' time at the beginning of the first step, as well as it can be known."""
    ends = {s.step: s.start_s + s.ms / 1e3 for s in samples}
    after = [e.time - ends[e.step] for e in events if e.step in ends]
    return min(after, default=min((e.time for e in events), default=0.0))


def _phases(samples: Sequence[StepSample], events: Sequence[Event], zero: float) -> list[_Record]:
    if samples:
        return [_phase_slice(band, samples) for band in bands_of([(s.step, s.phase) for s in samples])]
    changes = [e for e in events if isinstance(e, PhaseChanged)]
    if not changes:
        return []
    end = max(e.time for e in events)
    nexts = [*(e.time for e in changes[1:]), end]
    return [
        _slice("phases", e.phase, e.time - zero, until - e.time, {"reason": e.reason})
        for e, until in zip(changes, nexts, strict=True)
    ]


def _phase_slice(band: Band, samples: Sequence[StepSample]) -> _Record:
    inside = [s for s in samples if band.first <= s.step <= band.last]
    start, end = inside[0].start_s, inside[-1].start_s + inside[-1].ms / 1e3
    return _slice(
        "phases", band.phase, start, end - start, {"first step": band.first, "last step": band.last}
    )


def _compiles(events: Sequence[Event], zero: float) -> Iterable[_Record]:
    """Laid end to end before the moment when they were told: their lengths are known, not their order."""
    end = math.inf
    for event in reversed(events):
        if isinstance(event, Compiled) and math.isfinite(event.seconds):
            end = min(end, event.time - zero)
            end -= event.seconds
            yield _slice("compiling", event.region, end, event.seconds, event_to_dict(event))


def _slice(track: str, name: str, start_s: float, seconds: float, args: _Record) -> _Record:
    return {
        "name": name or "(no name)",
        "cat": track,
        "ph": "X",
        "ts": _microseconds(start_s),
        "dur": max(0.0, _microseconds(seconds)),
        "pid": _PID,
        "tid": _TRACKS[track],
        "args": args,
    }


def _instant(event: Event, start_s: float) -> _Record:
    return {
        "name": event.kind,
        "cat": "events",
        "ph": "i",
        "s": "t",
        "ts": _microseconds(start_s),
        "pid": _PID,
        "tid": _TRACKS["events"],
        "args": {**event_to_dict(event), "text": str(event)},
    }


def _counter(sample: StepSample) -> _Record:
    return {
        "name": "step_ms",
        "ph": "C",
        "ts": _microseconds(sample.start_s),
        "pid": _PID,
        "tid": 0,
        "args": {"step_ms": sample.ms},
    }


def _names(run: str) -> list[_Record]:
    tracks = [
        {"name": "thread_name", "ph": "M", "ts": 0, "pid": _PID, "tid": number, "args": {"name": name}}
        for name, number in _TRACKS.items()
    ]
    order = [
        {"name": "thread_sort_index", "ph": "M", "ts": 0, "pid": _PID, "tid": n, "args": {"sort_index": n}}
        for n in _TRACKS.values()
    ]
    process = {"name": "process_name", "ph": "M", "ts": 0, "pid": _PID, "tid": 0}
    return [{**process, "args": {"name": f"hotcompile {run}"}}, *tracks, *order]


def _facts(sample: StepSample) -> _Record:
    facts = {"step": sample.step, "ms": sample.ms, "phase": sample.phase, "compiled": sample.compiled}
    return {**facts, "note": sample.note} if sample.note else facts


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
