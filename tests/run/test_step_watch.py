"""Which step is recorded, and what is known of it then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.prior import OpStatistics
from lightning_hotcompile.run.step_watch import StepWatch, recorded_step
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.inductor import cpp_wrapper, dropout_masks
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.step_record import StepRecord
from tests.hot import STEP, hot
from tests.models import Net, Small, fit


def watching(stage: str = "train", **options: Any) -> tuple[StepWatch, list[str]]:
    """A watch over made-up steps, and the digests of what has become hot."""
    found: list[str] = []
    story: Any = SimpleNamespace(detected=lambda digest, *_: found.append(digest))
    trainer: Any = SimpleNamespace(precision="32-true")
    return StepWatch(trainer, Net(), HotCompileConfig(**options), stage, story), found


def track(watch: StepWatch, batch: str) -> Track:
    return watch.tracks.of(StepSignature("train", batch, (), b"", b"", "grad", (), "32", None))


def step(watch: StepWatch, track: Track, *, ends_unit: bool = True) -> None:
    watch.count(track, StepRecord(phase="observing", compiled=False, ends_unit=ends_unit))


@pytest.mark.parametrize(
    ("threshold", "step"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (9, 7), (10, 8), (50, 8)]
)
def test_a_step_before_anything_is_compiled(threshold: int, step: int) -> None:
    assert recorded_step(threshold) == step


@pytest.mark.parametrize(("threshold", "is_timed"), [(1, False), (3, True), (10, True)])
def test_times_of_the_first_step_are_not_used(
    threshold: int, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, found = list[int](), list[OpStatistics]()
    begin, of = StepWatch.begin_recording, OpStatistics.of

    def begun(self: StepWatch, record: StepRecord) -> None:
        assert self._last is not None
        steps.append(self._last.steps + 1)
        begin(self, record)

    def counted(*args: Any) -> OpStatistics:
        found.append(of(*args))
        return found[-1]

    monkeypatch.setattr(StepWatch, "begin_recording", begun)
    monkeypatch.setattr(OpStatistics, "of", counted)
    fit(Small(), hot(threshold=threshold, **STEP))
    assert steps == [recorded_step(threshold)]
    (statistics,) = found
    assert statistics.fusible > 0
    assert (statistics.light_s is not None) is is_timed
    if is_timed:
        assert 0 < statistics.light_s < statistics.all_s  # type: ignore[operator]


def test_draws_that_compiled_code_makes_faster_are_light(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []
    of = OpStatistics.of

    def counted(*args: Any) -> OpStatistics:
        asked.append(args[4])
        return of(*args)

    monkeypatch.setattr(OpStatistics, "of", counted)
    monkeypatch.setattr(dropout_masks, "why_not_drawn_here", lambda: None)
    monkeypatch.setattr(cpp_wrapper, "why_not_asked", lambda options: "asked for" if options else None)
    fit(Small(), hot(threshold=10), max_steps=9)  # by aot_eager
    given: list[dict[str, Any]] = [{}, {"random": "backend"}, {"options": {"cpp_wrapper": False}}]
    for options in given:
        fit(Small(), hot(threshold=10, backend="inductor", **options), max_steps=9)
    monkeypatch.setattr(dropout_masks, "why_not_drawn_here", lambda: "eager has another way")
    fit(Small(), hot(threshold=10, backend="inductor"), max_steps=9)
    assert asked == [frozenset(), frozenset({"bernoulli"}), frozenset(), frozenset(), frozenset()]


def test_a_step_that_was_taken_back_has_to_come_back_more_often_though_another_one_was_last() -> None:
    watch, found = watching(threshold=3)
    first, second = track(watch, "a"), track(watch, "b")
    for _ in range(3):
        step(watch, first)
        step(watch, second)
    watch.cool_down(first)
    assert (first.hot, second.hot) == (False, True)
    for turn in range(1, 7):
        step(watch, first)
        assert first.hot is (turn == 6)
        step(watch, second)
    assert found == [each.signature.digest for each in (first, second, first)]


def test_the_same_of_a_unit_of_several_micro_steps() -> None:
    watch, found = watching(threshold=2)
    first, second = track(watch, "a"), track(watch, "b")
    for _ in range(2):
        step(watch, first, ends_unit=False)
        step(watch, first)
        step(watch, second)
    watch.cool_down(first)
    assert (first.hot, second.hot) == (False, True)
    for turn in range(1, 5):
        step(watch, first, ends_unit=False)
        step(watch, first)
        assert first.hot is (turn == 4)
    assert len(found) == 3


def test_a_hot_step_that_was_forgotten_for_others_is_hot_again_when_it_comes_back() -> None:
    watch, _ = watching(threshold=3)
    for _ in range(3):
        step(watch, first := track(watch, "a"), ends_unit=False)
        step(watch, track(watch, "b"))
    assert first.hot
    for number in range(100):
        step(watch, track(watch, str(number)))
    again, other = track(watch, "a"), track(watch, "b")
    assert again is not first
    step(watch, again, ends_unit=False)
    step(watch, other)
    assert (again.hot, other.hot) == (True, True)


def test_what_was_taken_back_stays_cold_in_a_unit_that_is_hot() -> None:
    watch, _ = watching(threshold=2)
    first, second = track(watch, "a"), track(watch, "b")
    for _ in range(2):
        step(watch, first, ends_unit=False)
        step(watch, second)
    for _ in range(2):
        step(watch, first)
    first.state = State(phase=Phase.REVERTED, flips=1, may_retry=True)
    watch.cool_down(first)
    step(watch, first, ends_unit=False)
    step(watch, second)
    assert (first.hot, second.hot) == (False, True)


def test_a_unit_goes_on_for_all_kinds_of_steps_in_it() -> None:
    watch, _ = watching(threshold=2)
    first, second = track(watch, "a"), track(watch, "b")
    for each in (first, second):
        each.state = State(phase=Phase.SETTLING, flips=1)
        each.began_flip()
    numbers = []
    for _ in range(4):
        for each, ends_unit in ((first, False), (first, False), (second, True)):
            numbers.append(watch.unit_number)
            each.ran(lane=Lane.COMPILE, compiled=True, ends_unit=ends_unit)
            step(watch, each, ends_unit=ends_unit)
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [(each.settling_units, each.may_compile) for each in (first, second)] == [(4, 0)] * 2


def test_steps_at_rest_are_a_part_of_their_unit() -> None:
    """The short last batch was declined, but the others of its optimizer step may still become hot."""
    watch, found = watching(threshold=3)
    first, last = track(watch, "a"), track(watch, "b")
    for _ in range(3):
        step(watch, first, ends_unit=False)
        watch.count(last, StepRecord(phase="declined", compiled=False), at_rest=True)
    assert first.hot
    assert len(found) == 1
    watch.count(last, StepRecord(phase="declined", compiled=False), at_rest=True)  # a unit of its own
    assert watch.unit_number == 4


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        ([8], 1),
        ([8] * 12, 1),
        ([8, 4] * 10, 1 / 2),
        ([8, 4, 2] * 10, 1 / 3),
        ([8] * 300 + [4] * 5, 1),  # from now on all are of this kind
        ([4] + [8] * 300 + [4] * 5, 1),  # though one was at the very beginning
        (([8] * 9 + [4]) * 3, 1 / 10),  # the last batch of an epoch
        (([8] * 9 + [4]) * 3 + [8], 9 / 10),  # and the others
    ],
)
def test_how_often_a_kind_of_step_comes(sizes: list[int], share: float) -> None:
    watch, _ = watching("test", dynamic=False)
    tracks = [watch.track_of(torch.zeros(size), i, 0) for i, size in enumerate(sizes)]
    assert watch.share_of(tracks[-1]) == pytest.approx(share)


def test_the_hot_kind_of_step_is_the_one_that_comes_now_or_came_most_often() -> None:
    """Several ranks compile one kind: one that was hot once and never came back would let all wait."""
    watch, _ = watching("test", dynamic=False)
    sizes = [8] * 20 + [4] * 12 + [2] * 5
    tracks = {size: watch.track_of(torch.zeros(size), i, 0) for i, size in enumerate(sizes)}
    assert watch.hot_one(tracks[2]) is None
    for size in (4, 8):
        tracks[size].hot = True
    assert watch.hot_one(tracks[4]) is tracks[4]
    assert watch.hot_one(tracks[2]) is tracks[8]
    assert not watch.has_gone(tracks[8])
    for i in range(256):
        watch.track_of(torch.zeros(2), i, 0)
    assert watch.has_gone(tracks[8])
    assert watch.hot_one(tracks[2]) is None


def test_with_a_threshold_of_0_each_kind_is_hot() -> None:
    watch, _ = watching("test", threshold=0)
    now = watch.track_of(torch.zeros(8), 0, 0)
    assert watch.hot_one(now) is now


def test_one_that_has_not_come_again_yet_comes_seldom() -> None:
    watch, _ = watching("test", dynamic=False)
    first, *_ = [watch.track_of(torch.zeros(size), i, 0) for i, size in enumerate((8, 4, 4, 4))]
    assert watch.share_of(first) == 1 / 4
    assert watch.share_of(track(watch, "never seen")) == 1


def test_a_family_of_sizes_has_the_whole_run() -> None:
    watch, _ = watching("test")
    tracks = [watch.track_of(torch.zeros(size), i, 0) for i, size in enumerate(range(5, 45))]
    assert tracks[-1] is tracks[-20]
    assert watch.share_of(tracks[-1]) == 1
