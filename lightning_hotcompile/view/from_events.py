"""A Report from the event log alone: of a run that is under way, or that did not come to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from lightning_hotcompile.receipt.event_kinds import (
    Compiled,
    Declined,
    Event,
    ParityChecked,
    PhaseChanged,
    Planned,
    Recompiled,
    SpeedUp,
)
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.watch.stats import Ratio

CONFIDENCE = 0.98
"""Of the interval in a speed-up event of a version that did not write it."""

_E = TypeVar("_E", bound=Event)


def last_run(log: Sequence[Event]) -> list[Event]:
    """The events of the last run in a log to which several may have been appended.

    Those of training; of the first other stage if there are none. A step number that goes back begins
    another run.
    """
    stages = [event.stage for event in log]
    stage = "train" if "train" in stages or not stages else stages[0]
    own = [event for event in log if event.stage == stage]
    starts = [0, *(i for i in range(1, len(own)) if own[i].step < own[i - 1].step)]
    return own[starts[-1] :]


def report_from_events(events: Sequence[Event]) -> Report:
    """What the events of one run tell; the rest of the report says that it was not measured."""
    phase, reason = _standing(events)
    plan = _last(events, Planned)
    steps = max((event.step for event in events), default=0)
    seconds = [e.seconds for e in events if isinstance(e, Compiled) and math.isfinite(e.seconds)]
    return Report(
        phase=phase,
        reason=reason,
        scope=plan.scope if plan else "",
        plan=plan.tree if plan else "",
        plan_digest="",
        decision=_decision(events),
        steps=steps,
        compile_s=sum(seconds),
        stall_s=math.nan if seconds else 0.0,
        recompiles=sum(isinstance(e, Recompiled) for e in events),
        graph_breaks=None,
        parity=_parity(events),
        speedup=_speed_up(_last(events, SpeedUp)),
        notes=(
            f"This is what the event log tells, up to step {steps}: it does not hold the time of each step, "
            "the proof that compiled code ran, graph breaks, stalls and the balance. The report of a "
            "finished run (report.json) does.",
        ),
        events=tuple(event_to_dict(e) for e in events),
    )


def _standing(events: Sequence[Event]) -> tuple[str, str]:
    for event in reversed(events):
        if isinstance(event, PhaseChanged):
            return event.phase, event.reason
        if isinstance(event, Declined):
            return "declined", event.reason
    return "observing", "nothing was decided yet"


def _decision(events: Sequence[Event]) -> str:
    """What the forecast has said last: it is the reason of a phase that a forecast leads to."""
    forecast = ("prewarming", "flipping", "declined")
    told = (e.reason for e in reversed(events) if isinstance(e, PhaseChanged) and e.phase in forecast)
    return next(told, "")


def _parity(events: Sequence[Event]) -> str:
    checks = [e for e in events if isinstance(e, ParityChecked)]
    agree = sum(e.agrees is True for e in checks)
    return f"{agree} of {len(checks)} graphs agree with eager" if checks else "nothing was compared"


def _speed_up(event: SpeedUp | None) -> Ratio | None:
    if event is None or not math.isfinite(event.value):
        return None
    confidence = event.confidence or CONFIDENCE
    return Ratio(value=event.value, low=event.low, high=event.high, n=event.n, confidence=confidence)


def _last(events: Sequence[Event], kind: type[_E]) -> _E | None:
    return next((e for e in reversed(events) if isinstance(e, kind)), None)
