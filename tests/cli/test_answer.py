"""Which answer a report gives, in words and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hotcompile.cli.answer import Answer, numbers, rounded, sentences, stays_eager
from lightning_hotcompile.machine import Facts, Phase, State, advance
from lightning_hotcompile.receipt.report import RegionProof, Report
from lightning_hotcompile.watch.stats import Ratio, Summary

REPORT = Report(
    phase="steady",
    reason="faster: 1.50x [1.40, 1.60]",
    scope="step",
    plan="plan",
    plan_digest="abc",
    decision="",
    steps=60,
    compile_s=20.0,
    stall_s=25.0,
    recompiles=0,
    graph_breaks=0,
    parity="1 of 1 graphs agree with eager",
    eager_ms=Summary(n=10, median=30.0, q1=29.0, q3=31.0),
    compiled_ms=Summary(n=10, median=20.0, q1=19.0, q3=21.0),
    speedup=Ratio(value=1.5, low=1.4, high=1.6, n=10, confidence=0.98),
)


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(value=value, low=low, high=high, n=10, confidence=0.98)


def answer(planned_steps: int | None = None, ended: str = "", **changed: Any) -> Answer:
    report = replace(REPORT, **changed)
    return Answer(scope=None, report=report, ended=ended, planned_steps=planned_steps)


def test_yes_with_what_it_costs() -> None:
    found = answer()
    assert (found.kind, found.break_even_steps, found.break_even_s) == ("yes", 2500, 75.0)
    assert sentences(found) == [
        "yes: 1.50x faster (98% interval 1.40 to 1.60); compiling stops the training for 25.0 s, which is "
        "earned back after about 2,500 steps (75.0 s of eager training)"
    ]


@pytest.mark.parametrize(
    ("steps", "words"),
    [(2500, "too few"), (10, "too few"), (12_500, "it would save about 100.0 s")],
)
def test_yes_for_this_training(steps: int, words: str) -> None:
    _, second = sentences(answer(planned_steps=steps))
    assert f"has {steps:,} steps" in second
    assert words in second


def test_yes_without_medians_that_say_so_has_no_break_even() -> None:
    found = answer(planned_steps=100, compiled_ms=REPORT.eager_ms)
    assert (found.kind, found.break_even_steps) == ("yes", None)
    assert len(sentences(found)) == 1


@pytest.mark.parametrize(
    ("phase", "speedup", "words"),
    [
        (
            "reverted",
            ratio(0.8, 0.5, 0.9),
            "no: a compiled step takes 1.25 times as long as an eager one (98% ",
        ),
        ("reverted", ratio(0.99, 0.9, 1.1), "no: no difference from eager (0.99x, 98% interval"),
        ("steady", ratio(1.04, 0.99, 1.1), "no: no difference from eager (1.04x"),
        ("reverted", ratio(1.015, 1.011, 1.018), "no: only 1.01x faster"),
    ],
)
def test_no(phase: str, speedup: Ratio, words: str) -> None:
    taken_back = advance(State(phase=Phase.SETTLING), Facts(ratio=speedup, settling_is_over=True))
    reason = taken_back.state.reason if phase == "reverted" else "x"
    found = answer(phase=phase, speedup=speedup, reason=reason)
    assert (found.kind, found.break_even_steps) == ("no", None)
    (sentence,) = sentences(found)
    assert sentence.startswith(words)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"phase": "declined", "speedup": None}, "nothing could be compiled: too small"),
        ({"phase": "reverted", "speedup": None}, "the compiled code could not be used: too small"),
        (
            {"phase": "reverted"},
            "1.50x faster (98% interval 1.40 to 1.60), until the compiled code was taken back: too small",
        ),
        ({"speedup": None}, "compiled steps could not be timed against eager ones: too small"),
        (
            {"phase": "observing", "ended": "it ended"},
            "it ended before there was a verdict (observing: too small)",
        ),
    ],
)
def test_no_answer_has_its_reason(changed: dict[str, Any], words: str) -> None:
    found = answer(**{"reason": "too small.", **changed})
    assert found.kind == "none"
    assert sentences(found) == [f"no answer: {words}"]


def test_a_script_that_failed_has_no_numbers() -> None:
    found = Answer(scope="step", report=None, exit_code=3)
    assert (found.kind, found.speed, numbers(found)) == ("none", 0.0, [])
    assert sentences(found) == ["no answer: the script failed with exit code 3"]
    assert found.to_dict()["exit_code"] == 3


def test_the_numbers_behind_it() -> None:
    rows = dict(numbers(answer(planned_steps=500)))
    assert rows["eager step"].startswith("30.0 ms")
    assert rows["compiled step"].startswith("20.0 ms")
    assert rows["compiling"] == "20.0 s, training stood still for 25.0 s"
    assert (rows["break-even"], rows["this training"]) == ("2,500 steps", "500 steps")
    assert "stays eager" not in rows


def test_what_stays_eager_is_named() -> None:
    region = RegionProof(
        name="head", kind="module", members=("head",), graphs=0, runs=0, compile_s=0.0,
        proven=False, note="it failed",
    )  # fmt: skip
    report = replace(REPORT, regions=(region,), eager_parts=("optimizer",))
    assert stays_eager(report) == "head (it failed); optimizer (the step is faster without)"


def test_the_dictionary_is_plain_and_without_single_steps() -> None:
    record = answer(planned_steps=9).to_dict()
    assert (record["answer"], record["break_even_steps"], record["planned_steps"]) == ("yes", 2500, 9)
    assert record["speedup"]["verdict"] == "faster"
    assert "samples" not in record


def test_faster_answers_come_first() -> None:
    slow, fast = answer(), answer(speedup=ratio(2.0, 1.9, 2.1))
    assert sorted([slow, answer(ended="x"), fast], key=lambda a: a.speed)[-1] is fast
    assert [a.speed for a in (slow, fast, answer(ended="x"))] == [1.5, 2.0, 0.0]


@pytest.mark.parametrize(("steps", "shown"), [(7, 7), (87, 87), (4643, 4600), (123_456, 120_000)])
def test_an_estimate_has_two_figures(steps: int, shown: int) -> None:
    assert rounded(steps) == shown
