"""Times in seconds of a machine that is always as fast."""

from __future__ import annotations

import pytest

from lightning_hotcompile.bench import one_run, pace
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.one_run import Stopwatch
from lightning_hotcompile.bench.pace import REFERENCE_S, Pace


def a_pace(*samples: tuple[int, float]) -> Pace:
    made = Pace()
    made._samples = list(samples)
    return made


def test_between_two_samples_it_changes_steadily() -> None:
    assert a_pace((0, 1.0), (10, 3.0)).at([0, 5, 10, 20]) == pytest.approx([2.0, 2.0, 2.0, 2.0])
    samples = [(n, 1.0 if n < 50 else 3.0) for n in range(0, 110, 10)]
    found = a_pace(*samples).at([0, 40, 45, 50, 100])
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])


def test_a_single_sample_that_was_interrupted_does_not_count() -> None:
    samples = [(n, 9.0 if n == 50 else 1.0) for n in range(0, 110, 10)]
    assert a_pace(*samples).at([40, 50, 60]) == pytest.approx([1.0, 1.0, 1.0])


def test_without_a_sample_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="no sample"):
        Pace().at([1])


def test_it_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Pace()
    for step in range(1000):
        looked.sample(step)
    few = len(looked._samples)
    assert 1 <= few < 1000
    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    looked.sample(1000)
    assert len(looked._samples) == few + 1
    assert all(seconds > 0 for _, seconds in looked._samples)


def watched(slow: float, monkeypatch: pytest.MonkeyPatch, wait_s: float = 0.0) -> dict[str, object]:
    """A step of 1 s and 39 of 10 ms, on a machine that takes ``slow`` times as long for everything.

    Data comes ``wait_s`` later before the first step and in each, on any machine.
    """
    watch = Stopwatch({20, 40})
    watch.seconds = [slow * s + wait_s for s in [1.0] + 39 * [0.01]]
    watch._waits = [n * wait_s for n in range(1, 42)]
    watch._pace = a_pace(*((n, slow * REFERENCE_S) for n in range(0, 41, 5)))
    watch._weights = {n: {"weights": 1.0, "moved": 1.0} for n in (20, 40)}
    watch.started = slow * 0.1 + wait_s
    monkeypatch.setattr(one_run, "steady_s", lambda seconds: seconds[-1])
    return watch.times(0.0, slow * (1.39 + 0.2) + 41 * wait_s)


def test_a_slow_moment_is_none_of_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = watched(1.0, monkeypatch), watched(1.7, monkeypatch)
    for name in ("wall_s", "mean_s", "before_s"):
        assert slow[name] == pytest.approx(fast[name])
    assert (fast["wall_s"], fast["before_s"]) == pytest.approx((1.59, 0.1))
    assert slow["marks"] == {
        n: pytest.approx({"elapsed_s": 1.0 + (n - 1) * 0.01, "steady_s": 0.01, "weights": 1.0, "moved": 1.0})
        for n in (20, 40)
    }
    assert (slow["clock_s"], slow["worst_step_s"]) == pytest.approx((1.7 * 1.59, 1.7))


def test_a_slow_machine_waits_for_data_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a sleep are as long on any machine: made shorter, a slow machine would seem a fast one."""
    fast, slow = (watched(pace, monkeypatch, wait_s=0.005) for pace in (1.0, 1.7))
    assert fast["wall_s"] == pytest.approx(1.59 + 41 * 0.005)
    assert (fast["before_s"], fast["mean_s"]) == pytest.approx((0.105, 0.015))
    for name in ("wall_s", "mean_s", "before_s"):
        assert slow[name] == pytest.approx(fast[name])


def test_what_a_training_has_waited_is_counted_batch_by_batch() -> None:
    batches = CASES["data-bound"].batches()
    watch = Stopwatch((), waited_s=lambda: batches.waited_s)
    one_run._train(batches, CASES["data-bound"].model(), 3, [watch])
    least = CASES["data-bound"].wait_s
    assert len(watch._waits) == 4
    assert 3 * least <= watch._waits[-1] == batches.waited_s
    assert watch.times(watch.started, watch._last)["wall_s"] >= 2 * least
