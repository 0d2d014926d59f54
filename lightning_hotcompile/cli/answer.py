"""Is torch.compile worth it: the answer that a report gives, in words and numbers; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hotcompile.machine import TOO_SLOW
from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.report import Report

Kind = Literal["yes", "no", "none"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one measurement has found.

    Args:
        scope: that was asked for, ``None`` for the callback's own.
        report: of HotCompile, ``None`` if the script failed before there was one.
        ended: why there is no verdict, empty if there is one.
        planned_steps: batches that the script's training has, ``None`` if unknown.
        exit_code: of the script, 0 if it was ended on purpose.
    """

    scope: str | None
    report: Report | None
    ended: str = ""
    planned_steps: int | None = None
    exit_code: int = 0

    @property
    def kind(self) -> Kind:
        """Whether it is worth it, or whether that was not found out."""
        report = self.report
        if report is None or self.ended or report.speedup is None:
            return "none"
        if report.phase == "steady":
            return "yes" if report.speedup.verdict == "faster" else "no"
        return "no" if report.phase == "reverted" and TOO_SLOW in report.reason else "none"

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that a compiled step saves, ``None`` if it saves none or that was not measured."""
        report = self.report
        if report is None or report.eager_ms is None or report.compiled_ms is None:
            return None
        saved = report.eager_ms.median - report.compiled_ms.median
        return saved if saved > 0 else None

    @property
    def break_even_steps(self) -> int | None:
        """Steps after which compiling has paid for itself: time stood still / time saved in a step."""
        if self.kind != "yes" or self.saved_ms is None:
            return None
        assert self.report is not None
        return math.ceil(1e3 * self.report.stall_s / self.saved_ms)

    @property
    def break_even_s(self) -> float | None:
        """Seconds that so many eager steps take."""
        steps, report = self.break_even_steps, self.report
        if steps is None or report is None or report.eager_ms is None:
            return None
        return steps * report.eager_ms.median / 1e3

    @property
    def speed(self) -> float:
        """Eager time / compiled time for putting answers in order; 0 where there is none."""
        if self.kind == "none" or self.report is None or self.report.speedup is None:
            return 0.0
        return self.report.speedup.value

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the single steps."""
        report = self.report.to_dict() if self.report is not None else {}
        names = ("phase", "reason", "eager_ms", "compiled_ms", "speedup", "compile_s", "stall_s", "parity")
        more = ("graph_breaks", "recompiles", "eager_parts", "plan", "regions", "notes", "versions")
        return {
            "answer": self.kind,
            "sentences": sentences(self),
            "scope": self.scope,
            "break_even_steps": self.break_even_steps,
            "break_even_s": self.break_even_s,
            "planned_steps": self.planned_steps,
            "exit_code": self.exit_code,
            **{name: report.get(name) for name in (*names, *more)},
        }


def sentences(answer: Answer) -> list[str]:
    """The answer in plain words; the first sentence is the answer itself."""
    report = answer.report
    if report is None:
        return [f"no answer: the script failed with exit code {answer.exit_code}"]
    if answer.kind == "yes":
        return [_yes(answer, report), *_for_this_training(answer)]
    if answer.kind == "no":
        return [_no(report)]
    return [f"no answer: {_why_none(answer, report)}"]


def numbers(answer: Answer) -> list[tuple[str, str]]:
    """Name and value of each number behind the answer."""
    report = answer.report
    if report is None:
        return []
    even, planned = answer.break_even_steps, answer.planned_steps
    rows = [
        ("scope", report.scope),
        ("eager step", wording.step_time(report.eager_ms)),
        ("compiled step", wording.step_time(report.compiled_ms)),
        ("speed-up", wording.speed(report.speedup).removeprefix("speed-up ")),
        ("compiling", _compiling(report)),
        ("break-even", f"{even:,} steps" if even is not None else "none"),
        ("this training", f"{planned:,} steps" if planned is not None else "of unknown length"),
        ("parity", report.parity),
        ("graph breaks", "" if report.graph_breaks is None else str(report.graph_breaks)),
        ("stays eager", stays_eager(report)),
    ]
    return [(name, value) for name, value in rows if value]


def stays_eager(report: Report) -> str:
    """What of the plan does not run compiled, with the reason."""
    unproven = [f"{r.name} ({r.note})" if r.note else r.name for r in report.regions if not r.proven]
    slower = [f"{part} (the step is faster without)" for part in report.eager_parts]
    return "; ".join([*unproven, *slower])


def _yes(answer: Answer, report: Report) -> str:
    speed = wording.speed(report.speedup)
    took = f"compiling stops the training for {wording.seconds(report.stall_s)}"
    steps, back_s = answer.break_even_steps, answer.break_even_s
    if steps is None:
        return f"yes: {speed}; {took}"
    even = f"after about {rounded(steps):,} steps ({wording.seconds(back_s)} of eager training)"
    return f"yes: {speed}; {took}, which is earned back {even}"


def _for_this_training(answer: Answer) -> list[str]:
    """What that means for the training that the script would have made."""
    even, planned, saved_ms = answer.break_even_steps, answer.planned_steps, answer.saved_ms
    if even is None or planned is None or saved_ms is None:
        return []
    if planned <= even:
        return [
            f"The script's own training has {planned:,} steps: too few to earn that back. Longer trainings "
            "do, and later runs that find the compiled code in the cache."
        ]
    saved = wording.seconds((planned - even) * saved_ms / 1e3)
    return [f"The script's own training has {planned:,} steps: it would save about {saved}."]


def _no(report: Report) -> str:
    ratio = report.speedup
    assert ratio is not None
    if ratio.verdict == "slower":
        interval = f"{100 * ratio.confidence:g}% interval {1 / ratio.high:.2f} to {1 / ratio.low:.2f}"
        return f"no: a compiled step takes {1 / ratio.value:.2f} times as long as an eager one ({interval})"
    if ratio.verdict == "faster":
        return f"no: only {wording.speed(ratio)}"
    return f"no: {wording.speed(ratio)}"


def _why_none(answer: Answer, report: Report) -> str:
    reason = wording.one_line(report.reason)
    if answer.ended:
        return f"{answer.ended} before there was a verdict ({report.phase}: {reason})"
    if report.phase == "declined":
        return f"nothing could be compiled: {reason}"
    if report.phase == "reverted" and report.speedup is not None:
        return f"{wording.speed(report.speedup)}, until the compiled code was taken back: {reason}"
    if report.phase == "reverted":
        return f"the compiled code could not be used: {reason}"
    return f"compiled steps could not be timed against eager ones: {reason}"


def _compiling(report: Report) -> str:
    if report.compile_s == 0 and report.stall_s == 0:
        return "none"
    return f"{wording.seconds(report.compile_s)}, training stood still for {wording.seconds(report.stall_s)}"


def rounded(steps: int) -> int:
    """Two figures: it is an estimate.

    >>> rounded(4643), rounded(87)
    (4600, 87)
    """
    digits = max(0, len(str(steps)) - 2)
    return round(steps, -digits)
