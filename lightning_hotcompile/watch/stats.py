"""Spread-aware summaries of step times, and the ratio of two kinds of step measured in pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Median and quartiles of some samples, in the samples' own unit."""

    n: int
    median: float
    q1: float
    q3: float

    @property
    def iqr(self) -> float:
        """Distance between the quartiles: the spread of the middle half."""
        return self.q3 - self.q1


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest order statistics (numpy's default rule)."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(samples: Iterable[float]) -> Summary:
    """Median and quartiles of the samples, each by linear interpolation.

    Raises:
        ValueError: there are no samples, or one of them is not a finite number.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples to summarize: give at least one.")
    # NaN sorts anywhere, so that each sample has to be looked at, not only the ends.
    for value in ordered:
        if not math.isfinite(value):
            raise ValueError(f"sample {value!r} is not a finite number: leave it out.")
    q1, middle, q3 = (_quantile(ordered, fraction) for fraction in (0.25, 0.5, 0.75))
    return Summary(n=len(ordered), median=middle, q1=q1, q3=q3)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Eager time / compiled time with its confidence interval: above 1 the compiled step is faster."""

    value: float
    low: float
    high: float
    n: int
    confidence: float

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no difference`` when the interval contains 1."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no difference"

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def _sign_interval_rank(n: int, confidence: float) -> int:
    """Largest ``k`` for which the k-th smallest and k-th largest of ``n`` hold the median at this confidence.

    The number of samples below the true median is binomial(n, 1/2) whatever their distribution, so
    the interval misses with probability ``2 P(B <= k - 1)``. Counted in whole numbers: exact for any ``n``.
    0 when even the extremes do not reach the confidence.
    """
    allowed = (1 - Fraction(str(confidence))) * 2**n / 2
    rank, term, missed = 0, 1, 1
    while rank < n // 2 and missed <= allowed:
        rank += 1
        term = term * (n - rank + 1) // rank
        missed += term
    return rank


_ORDER = 0x698767626A358E0E
"""Of each of 64 pairs which kind comes first, as bits; found by search, see :func:`has_first_arm`."""


def has_first_arm(turn: int) -> bool:
    """Which of two kinds this turn has, counted from 0: in each pair both, in an order without a period.

    An order that is turned from pair to pair (one, other, other, one) has a period itself: steps one of which
    in four is heavy would always have the heavy one in the same arm. In this one steps that are heavy once in
    2 to 16 are heavy about as often in either arm.
    """
    pair, second = divmod(turn, 2)
    return second == _ORDER >> pair % 64 & 1


def paired_ratio(eager: Sequence[float], compiled: Sequence[float], confidence: float = 0.95) -> Ratio | None:
    """Median of eager time / compiled time over pairs of neighbouring steps.

    Pairing takes slow drift of the machine (clock speed, other jobs) out of the comparison: both steps
    of a pair see the same of it. The interval is that of the sign test, so it assumes nothing
    about how step times are distributed. Pairs in which a time is not a positive finite number are left out.

    Args:
        eager: seconds of the eager steps; the i-th belongs to the i-th of ``compiled``.
        compiled: seconds of the compiled steps, as many.
        confidence: probability with which the interval holds the true median ratio, between 0 and 1.

    Returns:
        The ratio, or ``None`` when the pairs are too few for this confidence (fewer than 6 at 0.95).

    Raises:
        ValueError: the two series differ in length, or the confidence is not between 0 and 1.

    Example:
        >>> str(paired_ratio([3.0] * 6, [2.0] * 6))
        '1.50x [1.50, 1.50]'
    """
    if len(eager) != len(compiled):
        raise ValueError(f"{len(eager)} eager and {len(compiled)} compiled times: give them in pairs.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} is not allowed: give a number between 0 and 1.")
    pairs = [(e, c) for e, c in zip(eager, compiled, strict=True) if _is_time(e) and _is_time(c)]
    ratios = sorted(e / c for e, c in pairs)
    n = len(ratios)
    rank = _sign_interval_rank(n, confidence)
    if rank == 0:
        return None
    return Ratio(
        value=_quantile(ratios, 0.5), low=ratios[rank - 1], high=ratios[n - rank], n=n, confidence=confidence
    )


def robust_ratio(eager: Sequence[float], compiled: Sequence[float], confidence: float = 0.95) -> Ratio | None:
    """As :func:`paired_ratio`, with another value: the estimate of Hodges and Lehmann (1963).

    That is the median of the geometric means of any two ratios, one twice included. It minds single outliers
    as little as the median. Where steps are heavy in turns, about half of the ratios are too large by some
    factor and the others too small by it: this has what is in the middle, the median would have one of both.
    """
    ratio = paired_ratio(eager, compiled, confidence)
    if ratio is None:
        return None
    ratios = [e / c for e, c in zip(eager, compiled, strict=True) if _is_time(e) and _is_time(c)]
    center = median(math.sqrt(a * b) for a, b in combinations_with_replacement(ratios, 2))
    return replace(ratio, value=min(max(center, ratio.low), ratio.high))


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
