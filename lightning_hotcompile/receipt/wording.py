"""The receipt's numbers in words. What was not measured is said to be so; a loss is called a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hotcompile.receipt.report import FusedOptimizer, Report
    from lightning_hotcompile.watch.stats import Ratio, Summary

NOT_MEASURED = "not measured"

UNDECIDED = ("prewarming", "flipping", "settling", "refining")
"""Phases that a verdict ends."""


def headline(report: Report) -> str:
    """The receipt in one sentence, fit for a log line."""
    words = [_decided(report)]
    if report.phase == "steady":
        words = [f"steady: {speed(report.speedup)}, {_balance_with_cost(report)}"]
    elif report.phase == "reverted":
        words += [f"measured {speed(report.speedup)}"] if report.speedup is not None else []
        words += [f"{saving(report.saved_s)} after {seconds(report.compile_s)} of compiling"]
    elif report.phase in UNDECIDED:
        words += ["the run ended before there was a verdict"] if report.ended else []
        words += [f"training stood still for {seconds(report.stall_s)}"] if report.stall_s > 0 else []
    return "; ".join([*words, *_fused(report), *_unproven(report)])


def speed(ratio: Ratio | None) -> str:
    """A speed-up with its interval; one that cannot be told from 1 is called no difference."""
    if ratio is None or not math.isfinite(ratio.value):
        return f"speed-up {NOT_MEASURED}"
    digits = 3 if abs(ratio.value - 1) < 0.01 else 2  # "1.00x faster" would read as a contradiction
    value, low, high = (f"{x:.{digits}f}" for x in (ratio.value, ratio.low, ratio.high))
    interval = f"{100 * ratio.confidence:g}% interval {low} to {high}"
    if ratio.verdict == "no difference":
        return f"no difference from eager ({value}x, {interval})"
    if ratio.verdict == "slower":
        return f"slower, {value}x of eager's speed ({interval})"
    return f"{value}x faster ({interval})"


def step_time(summary: Summary | None) -> str:
    """Median step time with its spread."""
    if summary is None or not math.isfinite(summary.median):
        return NOT_MEASURED
    spread = f"IQR {milliseconds(summary.iqr)}, " if summary.n > 1 else ""
    return f"{milliseconds(summary.median)} ({spread}{count(summary.n, 'step')})"


def milliseconds(value: float | None) -> str:
    """Three figures or more, with the unit.

    >>> milliseconds(0.0312), milliseconds(11.2), milliseconds(1234.5)
    ('0.0312 ms', '11.2 ms', '1234 ms')
    """
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    digits = 0 if abs(value) >= 999.5 else max(0, 2 - math.floor(math.log10(abs(value) or 1.0)))
    return f"{value:.{min(digits, 4)}f} ms"


def number(value: float | None, form: str, unit: str) -> str:
    """A number in a format of Python's, with what follows it."""
    return NOT_MEASURED if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


def seconds(value: float | None) -> str:
    """A length of time in the unit that reads best.

    >>> seconds(0.25), seconds(34.06), seconds(-600.0), seconds(9000.0)
    ('0.25 s', '34.1 s', '-10.0 min', '2.5 h')
    """
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if abs(value) < 9.995:
        return f"{value:.2f} s"
    if abs(value) < 119.95:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if abs(value) < 7200 else f"{value / 3600:.1f} h"


def saving(value: float | None) -> str:
    """Seconds saved, or lost if negative."""
    if value is None or not math.isfinite(value):
        return f"saving {NOT_MEASURED}"
    return f"{seconds(abs(value))} {'lost' if value < 0 else 'saved'}"


def balance(report: Report) -> str:
    """What the run saved or lost, by how much it is faster in all, and from which step on."""
    total = number(report.total_speedup, ".2f", "x in all, costs included")
    saved = saving(report.saved_s) + ("" if total == NOT_MEASURED else f" ({total})")
    return f"{saved}; {_break_even(report)}"


def _break_even(report: Report) -> str:
    """The step that earned the costs back; one to come is called expected."""
    step = report.break_even_step
    if step is not None:
        return f"break-even {'' if step <= report.steps else 'expected '}at step {step}"
    return "no break-even" if saving(report.saved_s).endswith("lost") else f"break-even {NOT_MEASURED}"


def memory(peaks_mb: Mapping[str, float]) -> str:
    """Peak memory of each arm."""
    known = {arm: mb for arm, mb in peaks_mb.items() if math.isfinite(mb)}
    return ", ".join(f"{arm} {mb:.1f} MB" for arm, mb in known.items()) or NOT_MEASURED


def count(number: int, noun: str) -> str:
    """A number with its noun, plural where due.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1200 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def names(members: tuple[str, ...]) -> str:
    """Member names, shortened to the first and the last where there are many.

    >>> names(("a", "b")), names(("a", "b", "c"))
    ('a, b', 'a ... c (3)')
    """
    return ", ".join(members) if len(members) < 3 else f"{members[0]} ... {members[-1]} ({len(members)})"


def one_line(text: str) -> str:
    """White space collapsed and the full stop taken off, to go into a sentence."""
    return " ".join(text.split()).rstrip(".")


def _decided(report: Report) -> str:
    reason = one_line(report.reason)
    if report.phase in ("declined", "reverted"):
        return f"{report.phase}, {'stayed' if report.phase == 'declined' else 'back to'} eager: {reason}"
    if report.phase == "prewarming":
        return f"prewarming, eager so far, while a child process compiles: {reason}"
    return f"{report.phase}: {reason}" + ("" if report.compile_s > 0 else "; nothing was compiled")


def _balance_with_cost(report: Report) -> str:
    return f"{saving(report.saved_s)} after {seconds(report.compile_s)} of compiling; {_break_even(report)}"


def _fused(report: Report) -> list[str]:
    kept = [each for each in report.fused if each.kept]
    words = [
        f"torch's fused {each.class_name} saves {milliseconds(each.saves_ms)} of each update" for each in kept
    ]
    return [*words, *([f"{saving(report.saved_s)} in all"] if kept and report.phase == "declined" else [])]


def fused(each: FusedOptimizer) -> str:
    """Torch's fused kernel against its loop."""
    if each.speedup is None:
        return f"torch's fused {each.class_name} " + (f"left: {each.reason}" if each.reason else "on trial")
    times = f"{milliseconds(each.fused_ms)} for an update, {milliseconds(each.loop_ms)} by the loop"
    verdict = "kept" if each.kept else "left"
    before = "" if each.timed_before is None else f"; an earlier run has timed it ({each.timed_before})"
    return f"torch's fused {each.class_name} {verdict}: {times}, {speed(each.speedup)}{before}"


def _unproven(report: Report) -> list[str]:
    missing = [region.name for region in report.regions if not region.proven]
    if not missing or report.phase not in ("steady", "settling", "refining"):
        return []
    total = count(len(report.regions), "planned region")
    return [f"{len(missing)} of {total} did NOT run compiled"]
