"""Single steps of a run: kept within bounds, and the rare ones kept at all."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.receipt.samples import MOST_SAMPLES, StepSample, StepSamples, json_with_rows
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.step_record import StepRecord

STEADY = ("steady", True, True, "")
STALLED = ("flipping", True, True, "stalled")


def test_all_steps_are_kept_while_they_are_few() -> None:
    book = StepSamples()
    book.add(1, 0.0, 0.0281234, ("observing", False, True, ""))
    book.add(2, 0.03, 3.2, STALLED)
    assert book.samples() == (
        StepSample(1, 0.0, 28.1234, "observing", False),
        StepSample(2, 0.03, 3200.0, "flipping", True, "stalled"),
    )


def test_a_long_run_stays_within_the_limit_and_evenly_spread() -> None:
    book = StepSamples()
    for step in range(1, 100_001):
        book.add(step, step / 50, 0.02, STEADY)
    steps = [s.step for s in book.samples()]
    assert MOST_SAMPLES / 2 <= len(steps) <= MOST_SAMPLES
    assert len(Counter(b - a for a, b in itertools.pairwise(steps))) == 1
    assert steps[-1] > 99_900


def test_rare_steps_stay_however_many_usual_ones_come() -> None:
    book = StepSamples(limit=50)
    for step in range(1, 5001):
        book.add(step, float(step), 0.02, STALLED if step in (11, 2000) else STEADY)
    assert [s.step for s in book.samples() if s.note] == [11, 2000]
    assert len(book.samples()) <= 50


def test_thinning_never_keeps_only_one_position_of_an_accumulation_cycle() -> None:
    book = StepSamples(limit=64)
    for step in range(1, 4001):
        last = step % 4 == 0
        book.add(step, float(step), 0.03 if last else 0.01, ("steady", True, last, ""))
    times = Counter(s.ms for s in book.samples())
    assert min(times[30.0], times[10.0]) >= 10


def test_many_kinds_stay_within_the_limit_too() -> None:
    book = StepSamples(limit=20)
    for step in range(1, 500):
        book.add(step, float(step), 0.01, (f"phase {step % 7}", bool(step % 2), True, ""))
    assert 10 <= len(book.samples()) <= 20


def booked(**facts: object) -> StepSample:
    ledger = Ledger()
    ledger.add(
        StepTime(tag=0, seconds=0.5, wait_seconds=0.25),
        StepRecord(**{"phase": "steady", "compiled": True, **facts}),  # type: ignore[arg-type]
    )
    return ledger.samples.samples()[0]


def test_the_ledger_says_why_a_time_is_not_a_usual_one() -> None:
    assert booked() == (1, 0.25, 500.0, "steady", True, "")
    assert booked(disturbed=True).note == "disturbed"
    assert booked(disturbed=True, recorded=True).note == "recorded"
    assert booked(disturbed=True, stalled=True, recorded=True).note == "stalled"
    assert booked(stalled=True).note == "stalled"


def test_the_ledger_lays_steps_and_waits_one_after_the_other() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.add(StepTime(tag=0, seconds=1.0, wait_seconds=0.5), StepRecord(phase="a", compiled=False))
    assert [s.start_s for s in ledger.samples.samples()] == [0.5, 2.0, 3.5]


def test_json_has_one_line_for_each_row_and_is_plain_json() -> None:
    plain = {"rows": [[1, 0.5, "ä"], [2, 1.0, 'b"']], "name": "x", "list": [1, 2]}
    text = json_with_rows(plain, "rows")
    assert json.loads(text) == plain
    assert '    [1, 0.5, "\\u00e4"],\n' in text
    assert json.loads(json_with_rows({"name": "x", "rows": []}, "rows")) == {"name": "x", "rows": []}
