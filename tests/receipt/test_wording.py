"""Numbers in words."""

from __future__ import annotations

import math

import pytest

from lightning_hotcompile.receipt import wording
from lightning_hotcompile.watch.stats import Ratio, Summary


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(value=value, low=low, high=high, n=20, confidence=0.995)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (ratio(1.42, 1.38, 1.47), "1.42x faster (99.5% interval 1.38 to 1.47)"),
        (ratio(0.9, 0.88, 0.93), "slower, 0.90x of eager's speed (99.5% interval 0.88 to 0.93)"),
        (ratio(1.2, 0.98, 1.3), "no difference from eager (1.20x, 99.5% interval 0.98 to 1.30)"),
        (ratio(1.004, 1.001, 1.008), "1.004x faster (99.5% interval 1.001 to 1.008)"),
        (ratio(math.inf, 1.0, math.inf), "speed-up not measured"),
        (None, "speed-up not measured"),
    ],
)
def test_speed_up_with_its_interval(measured: Ratio | None, words: str) -> None:
    assert wording.speed(measured) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "not measured"),
        (math.nan, "not measured"),
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (119.9, "119.9 s"),
        (120.0, "2.0 min"),
        (7200.0, "2.0 h"),
        (-34.06, "-34.1 s"),
    ],
)
def test_lengths_of_time(value: float | None, words: str) -> None:
    assert wording.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "not measured"),
        (math.inf, "not measured"),
        (0.0, "0.00 ms"),
        (0.00001, "0.0000 ms"),
        (0.0312, "0.0312 ms"),
        (1.0, "1.00 ms"),
        (11.23, "11.2 ms"),
        (812.4, "812 ms"),
        (15_000.0, "15000 ms"),
    ],
)
def test_milliseconds_keep_three_figures(value: float | None, words: str) -> None:
    assert wording.milliseconds(value) == words


def test_step_time_with_its_spread() -> None:
    summary = Summary(n=1, median=2.0, q1=2.0, q3=2.0)
    assert wording.step_time(summary) == "2.00 ms (1 step)"
    assert wording.step_time(None) == "not measured"


def test_a_loss_is_called_a_loss() -> None:
    assert wording.saving(-600.0) == "10.0 min lost"
    assert wording.saving(0.0) == "0.00 s saved"
    assert wording.saving(None) == "saving not measured"


def test_memory_leaves_out_what_is_not_known() -> None:
    assert wording.memory({}) == "not measured"
    assert wording.memory({"eager": 10.0, "compiled": math.nan}) == "eager 10.0 MB"


def test_members_are_shortened_from_three_on() -> None:
    assert wording.names(()) == ""
    assert wording.names(("a", "b")) == "a, b"
    assert wording.names(("a", "b", "c", "d")) == "a ... d (4)"
