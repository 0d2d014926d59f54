"""What a profiler's trace says of the training steps in it: compiled share, operators, kernel launches."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP_NAME = "hotcompile: training step"
"""The annotation around each captured step."""

COMPILED_NAMES = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
"""How the profiler names what runs inside of compiled code, with more behind it."""

_HOST = ("cpu_op", "user_annotation")
_RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime")

_Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Numbers per step; None where the trace cannot tell."""

    steps: int
    step_ms: float | None = None
    compiled_share: float | None = None
    """0 to 1, of the steps' time on the host."""

    operators_per_step: float | None = None
    launches_per_step: float | None = None


def analyse(events: Iterable[Mapping[str, Any]]) -> Analysis:
    """Count what lies inside of the steps of a Chrome trace; ``events`` are its ``traceEvents``."""
    slices = [e for e in events if e.get("ph") == "X" and isinstance(e.get("ts"), (int, float))]
    steps = sorted(
        _span(e) for e in slices if e.get("name") == STEP_NAME and e.get("cat") == "user_annotation"
    )
    total = sum(end - start for start, end in steps)
    if not total > 0:
        return Analysis(steps=len(steps))
    compiled = (_span(e) for e in slices if e.get("cat") in _HOST and _is_compiled(e))
    inside = _Steps(steps)
    launches = [e for e in slices if e.get("cat") in _RUNTIME and "Launch" in str(e.get("name"))]
    on_device = launches or any(e.get("cat") == "kernel" for e in slices)
    return Analysis(
        steps=len(steps),
        step_ms=statistics.median(end - start for start, end in steps) / 1e3,
        compiled_share=sum(inside.overlap(span) for span in _merged(compiled)) / total,
        operators_per_step=sum(e["ts"] in inside for e in _outermost_operators(slices)) / len(steps),
        launches_per_step=sum(e["ts"] in inside for e in launches) / len(steps) if on_device else None,
    )


class _Steps:
    """The spans of the steps, which do not overlap."""

    def __init__(self, steps: Sequence[_Span]) -> None:
        self._steps = steps
        self._starts = [start for start, _ in steps]

    def __contains__(self, moment: float) -> bool:
        index = bisect.bisect_right(self._starts, moment) - 1
        return index >= 0 and moment <= self._steps[index][1]

    def overlap(self, span: _Span) -> float:
        start, end = span
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, end)
        return sum(max(0.0, min(end, e) - max(start, s)) for s, e in self._steps[first:last])


def _span(event: Mapping[str, Any]) -> _Span:
    return event["ts"], event["ts"] + (event.get("dur") or 0.0)


def _is_compiled(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).startswith(COMPILED_NAMES)


def _merged(spans: Iterable[_Span]) -> Iterator[_Span]:
    """Spans without their overlaps: one compiled region has the events of all layers of the compiler."""
    current: _Span | None = None
    for start, end in sorted(spans):
        if current is None:
            current = (start, end)
        elif start <= current[1]:
            current = (current[0], max(current[1], end))
        else:
            yield current
            current = (start, end)
    if current is not None:
        yield current


def _outermost_operators(slices: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Operators that no other operator of their thread has called."""
    operators = [e for e in slices if e.get("cat") == "cpu_op" and str(e.get("name")).startswith("aten::")]
    until: dict[object, float] = {}
    # The longer one first where two begin together: it is the caller.
    for event in sorted(operators, key=lambda e: (e["ts"], -(e.get("dur") or 0.0))):
        start, end = _span(event)
        thread = (event.get("pid"), event.get("tid"))
        if start >= until.get(thread, -1.0):
            until[thread] = end
            yield event
