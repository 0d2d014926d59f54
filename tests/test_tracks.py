"""One track per step signature: its lanes, what it books, and how many are kept."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import ANY

import pytest

from lightning_hotcompile import tracks
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.tracks import Track, TrackBook
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.step_record import StepRecord

MISSES = tracks._MISSES_BEFORE_RECOMPILING
EPISODES = tracks._MAX_RECOMPILE_EPISODES
MAY_COMPILE = tracks._UNITS_THAT_MAY_COMPILE
SETTLING_UNITS = tracks._MAX_SETTLING_UNITS


def signature(name: object = "a") -> StepSignature:
    return StepSignature("train", str(name), (), b"", b"", "grad", (), "32", None)


def track(phase: Phase = Phase.OBSERVING, flips: int = 1, **fields: Any) -> Track:
    return Track(signature=signature(), state=State(phase=phase, flips=flips), **fields)


def steady() -> Track:
    found = track(Phase.STEADY)
    found.began_flip()
    for _ in range(MAY_COMPILE):
        found.ran(lane=Lane.COMPILE, compiled=True, ends_unit=True)
    return found


def miss(found: Track, times: int) -> None:
    for _ in range(times):
        found.ran(lane=Lane.REUSE, compiled=False, ends_unit=True)


class TestLane:
    @pytest.mark.parametrize("phase", [Phase.OBSERVING, Phase.DECLINED, Phase.REVERTED])
    def test_phases_without_compiled_code_are_eager(self, phase: Phase) -> None:
        assert track(phase, may_compile=3).lane() is Lane.EAGER

    def test_flipping_compiles(self) -> None:
        assert track(Phase.FLIPPING).lane() is Lane.COMPILE

    def test_settling_takes_turns_by_units(self) -> None:
        found = track(Phase.SETTLING)
        lanes = []
        for _ in range(6):
            for ends_unit in (False, True):  # two micro-steps a unit share a lane
                lanes.append(found.lane())
                found.ran(lane=lanes[-1], compiled=True, ends_unit=ends_unit)
        eager, compiled = [Lane.EAGER] * 2, [Lane.REUSE] * 2
        assert lanes == eager + compiled + compiled + eager + compiled + eager

    def test_refining_takes_turns_without_and_with_the_part_that_is_tried(self) -> None:
        found = track(Phase.REFINING)
        found.state = dataclasses.replace(found.state, trying="optimizer")
        arms = []
        for _ in range(6):
            arms.append((found.lane(), found.without))
            found.ran(lane=Lane.REUSE, compiled=True, ends_unit=True)
        without, whole = (Lane.REUSE, "optimizer"), (Lane.REUSE, None)
        assert arms == [without, whole, whole, without, whole, without]

    @pytest.mark.parametrize("phase", [Phase.SETTLING, Phase.STEADY])
    def test_nothing_is_left_out_in_other_phases(self, phase: Phase) -> None:
        assert track(phase).without is None

    def test_the_first_compiled_units_may_compile_and_later_ones_not(self) -> None:
        found = track(Phase.STEADY)
        found.began_flip()
        lanes = []
        for _ in range(MAY_COMPILE + 2):
            lanes.append(found.lane())
            found.ran(lane=lanes[-1], compiled=True, ends_unit=True)
        assert lanes == [Lane.COMPILE] * MAY_COMPILE + [Lane.REUSE] * 2

    def test_all_micro_steps_of_a_unit_that_may_compile_may(self) -> None:
        found = track(Phase.STEADY, may_compile=1)
        for _ in range(5):
            assert found.lane() is Lane.COMPILE
            found.ran(lane=Lane.COMPILE, compiled=True, ends_unit=False)
        found.ran(lane=Lane.COMPILE, compiled=True, ends_unit=True)
        assert found.lane() is Lane.REUSE


class TestBooks:
    def test_eager_steps_count_as_steps_only(self) -> None:
        found = track(Phase.SETTLING, may_compile=2)
        found.ran(lane=Lane.EAGER, compiled=False, ends_unit=True)
        assert (found.steps, found.compiled_steps, found.may_compile, found.misses) == (1, 0, 2, 0)

    def test_settling_is_over_after_enough_units_not_micro_steps(self) -> None:
        found = track(Phase.SETTLING)
        for _ in range(SETTLING_UNITS):
            assert not found.settling_is_over
            found.ran(lane=found.lane(), compiled=True, ends_unit=False)
            found.ran(lane=found.lane(), compiled=True, ends_unit=True)
        assert found.settling_is_over

    def test_a_trial_of_a_part_keeps_the_pairs_of_the_whole(self) -> None:
        found = track(Phase.SETTLING)
        pairs = found.interleaved
        found.state = dataclasses.replace(found.state, phase=Phase.REFINING, trying="optimizer")
        found.began_comparing()
        assert found.pairs is pairs
        trial = found.interleaved
        assert trial not in (None, pairs)
        found.began_comparing()  # the next part
        assert found.interleaved is not trial

    def test_what_is_timed_once_more_begins_anew(self) -> None:
        found = track(Phase.SETTLING, settling_units=7, looks=2)
        pairs = found.pairs
        found.began_comparing()
        assert (found.settling_units, found.looks, found.pairs is pairs) == (0, 0, False)

    @pytest.mark.parametrize("phase", [Phase.OBSERVING, Phase.FLIPPING, Phase.STEADY])
    def test_only_settling_counts_settling_units(self, phase: Phase) -> None:
        found = track(phase)
        found.ran(lane=found.lane(), compiled=True, ends_unit=True)
        assert found.settling_units == 0


class TestMisses:
    def test_a_few_misses_are_forgiven_by_a_hit(self) -> None:
        found = steady()
        for _ in range(5):
            miss(found, MISSES - 1)
            found.ran(lane=Lane.REUSE, compiled=True, ends_unit=True)
        assert (found.may_compile, found.recompile_episodes, found.failure) == (0, 0, None)

    def test_repeated_misses_allow_compiling_again(self) -> None:
        found = steady()
        miss(found, MISSES)
        assert found.lane() is Lane.COMPILE
        assert (found.may_compile, found.misses) == (MAY_COMPILE, 0)

    def test_a_storm_ends_in_a_failure(self) -> None:
        found = steady()
        miss(found, MISSES * EPISODES)
        assert found.failure is None
        miss(found, MISSES)
        assert found.failure is not None
        assert f"{EPISODES} times" in found.failure

    def test_a_new_flip_starts_afresh(self) -> None:
        found = steady()
        miss(found, MISSES * (EPISODES + 1))
        found.looks, before = 2, found.pairs
        before.add(StepRecord(phase="settling", compiled=False), 1.0)
        found.began_flip()
        same = {"signature": found.signature, "state": found.state, "steps": found.steps}
        fresh = Track(**same, may_compile=MAY_COMPILE)
        assert dataclasses.asdict(found) == {**dataclasses.asdict(fresh), "pairs": ANY, "trial": ANY}
        assert found.pairs is not before
        assert (found.pairs.eager, found.pairs.compiled) == ([], [])
        miss(found, MISSES)
        assert found.failure is None  # all the episodes of a first flip are there again


class TestBook:
    def test_a_signature_has_one_track(self) -> None:
        book = TrackBook()
        assert book.of(signature()) is book.of(signature())
        assert book.of(signature("b")) is not book.of(signature())
        assert len(list(book)) == 2

    def test_the_one_seen_longest_ago_goes_first(self) -> None:
        book = TrackBook(limit=2)
        first, second = book.of(signature(1)), book.of(signature(2))
        assert book.of(signature(1)) is first
        book.of(signature(3))
        assert book.of(signature(1)) is first
        assert book.of(signature(2)) is not second

    def test_it_stays_bounded(self) -> None:
        book = TrackBook(limit=8)
        for i in range(100):
            book.of(signature(i))
        assert len(list(book)) == 8

    def test_a_track_that_was_compiled_is_kept(self) -> None:
        book = TrackBook(limit=2)
        kept = book.of(signature("kept"))
        kept.state = State(phase=Phase.STEADY, flips=1)
        for i in range(10):
            book.of(signature(i))
        assert book.of(signature("kept")) is kept

    def test_the_newest_one_is_kept_though_all_others_were_compiled(self) -> None:
        book = TrackBook(limit=2)
        for name in ("a", "b"):
            book.of(signature(name)).state = State(phase=Phase.STEADY, flips=1)
        newest = book.of(signature("c"))
        assert book.of(signature("c")) is newest

    def test_the_main_track_is_the_compiled_one_then_the_longest(self) -> None:
        book = TrackBook()
        assert book.main() is None
        book.of(signature("a")).steps = 5
        book.of(signature("b")).steps = 9
        assert book.main() is book.of(signature("b"))
        book.of(signature("a")).state = State(phase=Phase.REVERTED, flips=1)
        assert book.main() is book.of(signature("a"))
        book.of(signature("b")).state = State(phase=Phase.STEADY, flips=1)
        book.of(signature("b")).compiled_steps = 1
        assert book.main() is book.of(signature("b"))

    @pytest.mark.parametrize("phase", list(Phase))
    def test_who_was_and_who_is_compiled(self, phase: Phase) -> None:
        book = TrackBook()
        book.of(signature("a"))
        assert (book.flipped(), book.anyone_uses_compiled_code()) == (0, False)
        book.of(signature("b")).state = State(phase=phase, flips=1)
        assert (book.flipped(), book.anyone_uses_compiled_code()) == (1, phase.uses_compiled_code)


def test_what_does_not_fit_is_compiled_again_only_where_that_pays() -> None:
    found = track(Phase.STEADY)
    for _ in range(10 * MISSES):
        assert found.lane() is Lane.REUSE
        found.ran(lane=Lane.REUSE, compiled=False, ends_unit=True, recompile_pays=lambda: False)
    assert (found.recompile_episodes, found.failure) == (0, None)
    for _ in range(MISSES):
        found.ran(lane=Lane.REUSE, compiled=False, ends_unit=True, recompile_pays=lambda: True)
    assert found.lane() is Lane.COMPILE
