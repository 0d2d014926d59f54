from __future__ import annotations

import math
import random
import statistics

import pytest

from lightning_hotcompile.watch.stats import Ratio, Summary, paired_ratio, summarize


def test_summarize_agrees_with_the_standard_library():
    rng = random.Random(0)
    for n in range(2, 40):
        samples = [rng.gauss(0, 1) for _ in range(n)]
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        summary = summarize(samples)
        assert (summary.n, summary.median) == (n, pytest.approx(median))
        assert (summary.q1, summary.q3) == (pytest.approx(q1), pytest.approx(q3))
        assert summary.iqr == pytest.approx(q3 - q1)


def test_summarize_takes_any_iterable_and_one_sample():
    assert summarize(x for x in [2.0]) == Summary(n=1, median=2.0, q1=2.0, q3=2.0)


def test_summarize_refuses_nothing():
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_summarize_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="not a finite number"):
        summarize([1.0, bad, 2.0])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.9, 1.1, "no difference"), (1.0, 1.1, "no difference")],
)
def test_verdict(low, high, verdict):
    assert Ratio(value=1.0, low=low, high=high, n=9, confidence=0.95).verdict == verdict


def test_ratio_reads_well():
    assert str(Ratio(value=1.424, low=1.38, high=1.468, n=9, confidence=0.95)) == "1.42x [1.38, 1.47]"


@pytest.mark.parametrize(("confidence", "least"), [(0.5, 2), (0.9, 5), (0.95, 6), (0.99, 8), (0.999, 11)])
def test_too_few_pairs_give_none(confidence, least):
    # Even the extremes of n pairs miss the median with probability 2 / 2**n.
    assert 2 / 2**least <= 1 - confidence + 1e-12
    assert paired_ratio([2.0] * (least - 1), [1.0] * (least - 1), confidence) is None
    ratio = paired_ratio([2.0] * least, [1.0] * least, confidence)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == (2.0, 2.0, 2.0, least)
    assert paired_ratio([], []) is None


@pytest.mark.parametrize(
    ("n", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (30, 10), (50, 18), (100, 40)]
)
def test_interval_is_the_tabulated_one_of_the_sign_test(n, rank):
    ratios = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(ratios)
    ratio = paired_ratio(ratios, [1.0] * n)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (rank, n + 1 - rank)
    assert ratio.value == (n + 1) / 2


def test_many_pairs_do_not_overflow():
    ratio = paired_ratio([1.0, 2.0] * 2000, [1.0] * 4000)
    assert ratio is not None
    assert ratio.n == 4000


def test_pairs_take_drift_out():
    # The machine becomes ten times slower in the course of the run, far more than the 5% between the two.
    speed = [1 + 9 * i / 39 for i in range(40)]
    ratio = paired_ratio([1.05 * s for s in speed], speed)
    assert ratio is not None
    assert ratio.verdict == "faster"
    assert ratio.value == pytest.approx(1.05)


def test_pairs_without_a_time_are_left_out():
    eager = [2.0] * 8 + [0.0, math.nan, 1.0, -1.0]
    compiled = [1.0] * 8 + [1.0, 1.0, 0.0, 1.0]
    ratio = paired_ratio(eager, compiled)
    assert ratio is not None
    assert (ratio.n, ratio.value) == (8, 2.0)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="2 eager and 1 compiled"):
        paired_ratio([1.0, 2.0], [1.0])
    for confidence in (0.0, 1.0, 95):
        with pytest.raises(ValueError, match="confidence="):
            paired_ratio([1.0], [1.0], confidence)


def _noisy_series(rng: random.Random, n: int) -> tuple[list[float], list[float]]:
    """Equal steps on a drifting machine with skewed noise and a rare long stall."""
    eager, compiled = [], []
    drift = 1.0
    for _ in range(n):
        drift *= math.exp(rng.gauss(0, 0.02))
        for series in (eager, compiled):
            stall = 20.0 if rng.random() < 0.02 else 1.0
            series.append(drift * stall * rng.lognormvariate(0, 0.1))
    return eager, compiled


@pytest.mark.parametrize("n", [8, 15, 40])
def test_no_difference_is_rarely_called_one(n):
    rng = random.Random(n)
    trials = 2000
    wrong = sum(paired_ratio(*_noisy_series(rng, n)).verdict != "no difference" for _ in range(trials))
    # At most 5% by construction; three standard errors of the simulation on top.
    assert wrong / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_a_real_difference_is_found():
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        eager, compiled = _noisy_series(rng, 40)
        found += paired_ratio([1.2 * e for e in eager], compiled).verdict == "faster"
    assert found >= 190
