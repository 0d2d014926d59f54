from __future__ import annotations

import random
import subprocess
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch

from lightning_hotcompile.errors import ConfigError, HotCompileError
from lightning_hotcompile.watch.detector import DetectorStats, StepDetector


@dataclass(frozen=True)
class Named:
    digest: str


def feed(detector, *signatures):
    """One unit of one step for each signature; the indices of those that became hot."""
    became_hot = []
    for i, signature in enumerate(signatures):
        detector.begin_step(signature)
        if detector.end_step():
            became_hot.append(i)
    return became_hot


def test_hot_at_the_threshold_and_told_once():
    detector = StepDetector(threshold=3)
    assert feed(detector, *"aaaaaa") == [2]
    assert detector.is_hot
    assert detector.hot_signatures == ("a",)
    assert detector.count("a") == 6
    assert detector.last_unit == "a"


def test_default_threshold_is_ten():
    assert feed(StepDetector(), *"a" * 20) == [9]


def test_is_hot_is_about_the_last_unit():
    detector = StepDetector(threshold=2)
    assert not detector.is_hot
    feed(detector, *"aa")
    assert detector.is_hot
    feed(detector, "b")
    assert not detector.is_hot
    feed(detector, "a")
    assert detector.is_hot


def test_a_short_last_batch_does_not_reset_the_run():
    detector = StepDetector(threshold=10)
    assert feed(detector, *("aaab" * 4)) == [12]  # the tenth "a"
    assert detector.hot_signatures == ("a",)


def test_alternating_steps_both_become_hot():
    assert feed(StepDetector(threshold=3), *"ababab") == [4, 5]


def test_a_longer_gap_starts_the_run_again():
    detector = StepDetector(threshold=3)
    assert feed(detector, *"aabba") == []
    assert detector.count("a") == 3
    assert feed(detector, *"aa") == [1]


@pytest.mark.parametrize(("gap", "hot"), [(0, []), (1, []), (2, [4])])
def test_gap_rule_is_an_option(gap, hot):
    assert feed(StepDetector(threshold=3, max_gap=gap), *"aaxya") == hot


def test_kinds_of_steps_that_take_turns_become_hot():
    assert feed(StepDetector(threshold=3), *"abcabcabcabcabcabc") == [15, 16, 17]


def test_kinds_of_steps_in_any_order_become_hot():
    detector = StepDetector(threshold=10)
    feed(detector, *random.Random(0).choices("abcd", k=160))
    assert set(detector.hot_signatures) == set("abcd")


def test_what_comes_now_and_then_stays_cold():
    detector = StepDetector(threshold=3)
    feed(detector, *("abcdefghi" * 12))  # nine kinds: each comes too rarely
    assert detector.hot_signatures == ()


def test_what_came_long_ago_does_not_count():
    detector = StepDetector(threshold=3)
    feed(detector, *("axyaxyaxyaxyaxy"), *("z" * 30))
    assert "a" not in detector.hot_signatures
    assert feed(detector, *"axyaxy") == []


def test_a_raised_threshold_holds_for_steps_that_take_turns():
    detector = StepDetector(threshold=3)
    feed(detector, *("abc" * 6))
    detector.raise_threshold("a")
    assert feed(detector, *("abc" * 11)) == []
    assert feed(detector, *"a") == [0]


def test_no_gap_allowed_means_consecutive():
    assert feed(StepDetector(threshold=3, max_gap=0), *"aabaaa") == [5]


def test_threshold_zero_is_hot_from_the_start():
    detector = StepDetector(threshold=0)
    assert detector.is_hot
    detector.begin_step("a")
    assert detector.is_hot
    assert detector.end_step()
    assert feed(detector, *"aab") == [2]
    assert detector.is_hot


def test_accumulation_cycle_is_one_unit():
    detector = StepDetector(threshold=3)
    told = []
    for step in range(12):
        detector.begin_step("micro")
        told.append(detector.end_step(boundary=step % 4 == 3))
    assert told.index(True) == 11
    assert told.count(True) == 1
    stats = detector.stats()
    assert (stats.steps_seen, stats.units_seen, stats.unique) == (12, 3, 1)
    assert detector.count(detector.last_unit) == 3
    assert detector.count("micro") == 0


def test_units_differ_by_order_and_length_of_their_steps():
    def unit(*steps):
        detector = StepDetector()
        for i, step in enumerate(steps):
            detector.begin_step(step)
            detector.end_step(boundary=i == len(steps) - 1)
        return detector.last_unit

    units = [unit("a"), unit("a", "a"), unit("a", "b"), unit("b", "a"), unit("a", "b", "b"), unit(("a", "b"))]
    assert len(set(units)) == len(units)
    assert unit("a", "a", "b") == unit("a", "a", "b")
    assert unit(Named("x"), Named("y")).digest == unit(Named("x"), Named("y")).digest
    assert unit(Named("x"), Named("y")).digest != unit(Named("y"), Named("x")).digest


def test_long_accumulation_of_equal_steps_is_kept_small():
    detector = StepDetector()
    for _ in range(1000):
        detector.begin_step("a")
        detector.end_step(boundary=False)
    assert len(detector._unit) == 1


def test_an_exception_in_mid_step_leaves_no_trace():
    detector = StepDetector(threshold=2)
    feed(detector, "a")
    detector.begin_step("b")  # and it raised
    assert feed(detector, "a") == [0]
    assert detector.stats().steps_seen == 2


def test_memory_is_bounded_and_the_oldest_goes_first():
    detector = StepDetector(threshold=100, max_signatures=3)
    feed(detector, "a", "b", "c", "a", "d")
    assert [detector.count(s) for s in "abcd"] == [2, 0, 1, 1]
    feed(detector, *map(str, range(1000)))
    assert len(detector._tracks) == 3
    assert detector.stats().unique == 1004


def test_hot_and_raised_signatures_stay_longer():
    detector = StepDetector(threshold=2, max_signatures=3)
    feed(detector, *"hhrr")
    detector.raise_threshold("r", 4)
    feed(detector, *"abcdefg")
    assert "h" in detector.hot_signatures
    assert detector.threshold_of("r") == 8


def test_all_hot_still_makes_room():
    detector = StepDetector(threshold=1, max_signatures=2)
    assert feed(detector, *"abc") == [0, 1, 2]
    assert detector.hot_signatures == ("b", "c")


def test_raised_threshold_has_to_be_earned_again():
    detector = StepDetector(threshold=2)
    feed(detector, *"aa")
    detector.raise_threshold("a", 2.5)
    assert not detector.is_hot
    assert detector.threshold_of("a") == 5
    assert detector.threshold_of("b") == 2
    assert feed(detector, *"aaaaaa") == [4]
    detector.raise_threshold("a", 2)
    assert detector.threshold_of("a") == 10


def test_raising_works_from_zero_and_for_unknown_signatures():
    detector = StepDetector(threshold=0)
    feed(detector, "a")
    detector.raise_threshold("a", 3)
    assert not detector.is_hot
    assert feed(detector, *"aaa") == [2]
    detector.raise_threshold("new", 2)
    assert detector.threshold_of("new") == 2


@pytest.mark.parametrize("factor", [1, 0.5, float("nan"), float("inf"), "2"])
def test_wrong_factor_is_refused(factor):
    with pytest.raises(ConfigError, match="factor="):
        StepDetector().raise_threshold("a", factor)


@pytest.mark.parametrize(
    "option", [{"threshold": -1}, {"threshold": True}, {"max_signatures": 0}, {"max_gap": -1}]
)
def test_wrong_options_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        StepDetector(**option)


def test_reset_forgets_everything():
    detector = StepDetector(threshold=2)
    feed(detector, *"aab")
    detector.raise_threshold("b", 2)
    detector.reset()
    assert detector.stats() == DetectorStats(steps_seen=0, units_seen=0, unique=0, hot=0, threshold=2, top=())
    assert detector.last_unit is None
    assert detector.threshold_of("b") == 2
    assert feed(detector, *"aa") == [1]


def test_stats_show_the_top_five_by_digest_or_repr():
    detector = StepDetector(threshold=3)
    signatures = [Named("n")] * 5 + ["s"] * 4 + list("ccc") + list("dd") + ["e"] * 2 + ["f"]
    feed(detector, *signatures)
    stats = detector.stats()
    assert (stats.steps_seen, stats.units_seen, stats.unique, stats.hot, stats.threshold) == (17, 17, 6, 3, 3)
    assert stats.top == (("n", 5), ("'s'", 4), ("'c'", 3), ("'d'", 2), ("'e'", 2))


def manual_step(detector, *ops):
    detector.begin_step()
    for op, *tensors in ops:
        detector.record(op, *tensors)
    return detector.end_step()


def test_manual_loop_becomes_hot_by_shapes_and_dtypes():
    detector = StepDetector(threshold=2)
    assert not manual_step(detector, ("linear", torch.zeros(4, 8), torch.zeros(8, 2)))
    assert manual_step(detector, ("linear", torch.ones(4, 8), torch.ones(8, 2)))
    assert detector.is_hot


@pytest.mark.parametrize(
    "other",
    [
        ("relu", torch.zeros(4, 8), 2),
        ("linear", torch.zeros(4, 9), 2),
        ("linear", torch.zeros(4, 8, dtype=torch.float64), 2),
        ("linear", torch.zeros(4, 8, device="meta"), 2),
        ("linear", torch.zeros(4, 8), 3),
        ("linear", torch.zeros(4, 8), 2.0),
        ("linear", 2, torch.zeros(4, 8)),
        ("linear", [torch.zeros(4, 8)], 2),
        ("linear", torch.zeros(4, 8)),
    ],
)
def test_manual_signature_sees_each_difference(other):
    detector = StepDetector()
    manual_step(detector, ("linear", torch.zeros(4, 8), 2))
    first = detector.last_unit
    manual_step(detector, other)
    assert detector.last_unit != first


def test_manual_signature_depends_on_the_order_of_operations_only():
    detector = StepDetector()
    a, b = ("a", torch.zeros(1)), ("b", torch.zeros(1))
    manual_step(detector, a, b)
    first = detector.last_unit
    manual_step(detector, b, a)
    assert detector.last_unit != first
    manual_step(detector, a, b)
    assert detector.last_unit == first


def test_objects_count_by_type_and_not_by_address():
    detector = StepDetector()
    manual_step(detector, ("op", object(), torch.nn.Identity()))
    first = detector.last_unit
    manual_step(detector, ("op", object(), torch.nn.Identity()))
    assert detector.last_unit == first


def test_record_keeps_no_tensor():
    detector = StepDetector()
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    detector.begin_step()
    detector.record("op", tensor)
    del tensor
    assert gone() is None


def test_manual_digest_is_the_same_in_another_process():
    script = (
        "import torch; from lightning_hotcompile.watch.detector import StepDetector;"
        "d = StepDetector(); d.begin_step();"
        "d.record('mm', torch.zeros(2, 3), (1, 'x'), torch.float16, None);"
        "d.end_step(); print(d.last_unit.digest)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    detector = StepDetector()
    manual_step(detector, ("mm", torch.zeros(2, 3), (1, "x"), torch.float16, None))
    assert run.stdout.strip() == detector.last_unit.digest


def test_misuse_names_the_remedy():
    detector = StepDetector()
    with pytest.raises(HotCompileError, match="begin_step"):
        detector.end_step()
    with pytest.raises(HotCompileError, match="begin_step"):
        detector.record("mm")
    detector.begin_step("a")
    with pytest.raises(HotCompileError, match="signature 'a'"):
        detector.record("mm")
    detector.begin_step()
    with pytest.raises(HotCompileError, match="record"):
        detector.end_step()
