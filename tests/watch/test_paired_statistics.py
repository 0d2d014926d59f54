"""How often the decision of the settling phase is wrong, on made-up step times with a known truth.

The real judge, track and machine decide; only the times are made up, by seeded generators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import Phase, State, advance
from lightning_hotcompile.run.judge import SETTLING_CONFIDENCE, SETTLING_LOOKS, Judge
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.stats import Ratio, paired_ratio
from lightning_hotcompile.watch.step_record import StepRecord

RUNS, FEWER = 2000, 1000
"""With the first number a true 4% is told from 5% with some room; less is needed for a real difference."""

UNITS = 2 * SETTLING_LOOKS[-1]
ALLOWED = 0.05
"""Share of runs in which a difference may be found that is not there."""

Noise = Callable[[random.Random], list[float]]
"""Gives the seconds of one unit after the other, as an eager arm would take them."""


# --- noise: what makes the times of equal steps differ --------------------------------------------------


def log_normal(rng: random.Random) -> list[float]:
    """5% of noise, skewed to the right."""
    return [rng.lognormvariate(0, 0.05) for _ in range(UNITS)]


def spikes(rng: random.Random) -> list[float]:
    """3% of noise, and one unit in 30 that takes ten times as long."""
    return [rng.lognormvariate(0, 0.03) * (10 if rng.random() < 1 / 30 else 1) for _ in range(UNITS)]


def drift(rng: random.Random) -> list[float]:
    """A machine that wanders by 1% from unit to unit, and is half as fast at the end."""
    walk, times = 0.0, []
    for _ in range(UNITS):
        walk += rng.gauss(math.log(2) / UNITS, 0.01)
        times.append(math.exp(walk) * rng.lognormvariate(0, 0.05))
    return times


def autocorrelated(memory: float) -> Noise:
    """5% of noise, of which ``memory`` is left in the next unit."""

    def noise(rng: random.Random) -> list[float]:
        state, times = rng.gauss(0, 0.05), []
        fresh = 0.05 * math.sqrt(1 - memory**2)
        for _ in range(UNITS):
            times.append(math.exp(state))
            state = memory * state + rng.gauss(0, fresh)
        return times

    return noise


NOISES: dict[str, Noise] = {
    "log-normal": log_normal,
    "spikes": spikes,
    "drift": drift,
    "short memory": autocorrelated(0.4),
    "long memory": autocorrelated(0.9),
}


# --- the settling phase, without a training -------------------------------------------------------------


EAGER, COMPILED = (StepRecord(phase="settling", compiled=compiled) for compiled in (False, True))


@dataclass(frozen=True, kw_only=True)
class End:
    """How one settling phase has ended: the phase after it, and the ratio that decided."""

    phase: Phase
    ratio: Ratio


def judge_of(min_speedup: float) -> Judge:
    """A judge of a signature whose compiled code is in place and does not fail."""
    installation = SimpleNamespace(parts={"step": frozenset(["training_step"])})
    flip: Any = SimpleNamespace(in_place=True, failure=lambda: None, installation=installation)
    memory = SimpleNamespace(of=lambda signature: None)
    weighing: Any = SimpleNamespace(known=lambda track: None)
    context: Any = SimpleNamespace(
        trainer=None,
        config=HotCompileConfig(min_speedup=min_speedup),
        stage="train",
        watch=None,
        memory=memory,
        side=SimpleNamespace(is_deciding=False),
    )
    return Judge(context, flip, weighing)


def settle(judge: Judge, times: list[float], speedup: float) -> End:
    """Interleave eager units with compiled ones that are ``speedup`` times as fast, until it is decided."""
    signature = StepSignature("train", "a", (), b"", b"", "grad", (), "32", None)
    track = Track(signature=signature, state=State(phase=Phase.SETTLING))
    for seconds in times:
        lane = track.lane()
        compiled = lane is not Lane.EAGER
        track.pairs.add(COMPILED if compiled else EAGER, seconds / speedup if compiled else seconds)
        track.ran(lane=lane, compiled=compiled, ends_unit=True)
        if track.pairs.n < SETTLING_LOOKS[track.looks]:
            continue  # nothing is looked at
        facts = judge.facts(track)
        assert facts.ratio is not None
        phase = advance(track.state, facts).state.phase
        if phase is not Phase.SETTLING:
            return End(phase=phase, ratio=facts.ratio)
        track.looks += 1
    raise AssertionError(f"not decided after {track.pairs.n} pairs")


@cache
def series(name: str) -> list[list[float]]:
    rng = random.Random(7)
    return [NOISES[name](rng) for _ in range(RUNS)]


@cache
def ends(name: str, *, speedup: float, min_speedup: float = 1.02, runs: int = FEWER) -> list[End]:
    judge = judge_of(min_speedup)
    return [settle(judge, times, speedup) for times in series(name)[:runs]]


def wrong(name: str, min_speedup: float) -> int:
    """How many runs find a difference between equal arms."""
    found = ends(name, speedup=1.0, min_speedup=min_speedup, runs=RUNS)
    return sum(end.ratio.verdict != "no difference" for end in found)


# --- no difference --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "min_speedup"),
    # At 1.0 each interval that excludes 1 decides; the default is looked at with the worst noise.
    [*((name, 1.0) for name in NOISES), ("short memory", 1.02)],
)
def test_a_difference_that_is_not_there_is_found_in_under_5_percent(name: str, min_speedup: float) -> None:
    assert wrong(name, min_speedup) < ALLOWED * RUNS


def chance_of_any_verdict(confidence: float) -> float:
    """Exact, for independent pairs of equal arms: some look finds a difference.

    Each pair has eager above or below compiled with probability 1/2, so the count of those above is a
    random walk; the walks that a look stops are taken out.
    """
    walks, pairs, found = {0: 1.0}, 0, 0.0
    for look in SETTLING_LOOKS:
        for _ in range(look - pairs):
            walks = {k: (walks.get(k, 0.0) + walks.get(k - 1, 0.0)) / 2 for k in range(max(walks) + 2)}
        pairs = look
        stopped = [k for k in walks if finds_a_difference(k, look, confidence)]
        found += sum(walks.pop(k) for k in stopped)
    return found


def finds_a_difference(above: int, pairs: int, confidence: float) -> bool:
    ratio = paired_ratio([2.0] * above + [0.5] * (pairs - above), [1.0] * pairs, confidence)
    return ratio is not None and ratio.verdict != "no difference"


def test_the_exact_chance_of_a_wrong_verdict_at_any_look() -> None:
    assert chance_of_any_verdict(SETTLING_CONFIDENCE) == pytest.approx(0.0261, abs=5e-5)
    # Why it is not 95%, the confidence of a single look.
    assert chance_of_any_verdict(0.95) == pytest.approx(0.0790, abs=5e-5)


def test_the_exact_chance_is_the_simulated_one() -> None:
    exact = chance_of_any_verdict(SETTLING_CONFIDENCE)
    assert abs(wrong("log-normal", 1.0) / RUNS - exact) < 3 * math.sqrt(exact * (1 - exact) / RUNS)


# --- a difference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize(
    ("speedup", "phase"), [(1.10, Phase.STEADY), (0.90, Phase.REVERTED)], ids=["faster", "slower"]
)
def test_a_real_difference_decides(name: str, speedup: float, phase: Phase) -> None:
    found = [end.phase for end in ends(name, speedup=speedup)]
    assert found.count(phase) >= 0.95 * FEWER


def test_a_clear_difference_is_seen_at_the_first_look() -> None:
    found = ends("log-normal", speedup=1.5)
    assert {(end.phase, end.ratio.n) for end in found} == {(Phase.STEADY, SETTLING_LOOKS[0])}
    assert {end.ratio.confidence for end in found} == {SETTLING_CONFIDENCE}
