"""Page faults of the first steps, and what is done about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_hotcompile import HotCompile
from lightning_hotcompile.run.heap_watch import MANY, HeapWatch
from lightning_hotcompile.swap.process import heap
from tests.models import Net, fit, seeded


class Heap:
    """Faults of a step, before and after glibc was told to keep what is freed."""

    def __init__(self, before: int, after: int) -> None:
        self.count = 0
        self.each, self.after = before, after
        self.kept = 0

    def page_faults(self) -> int:
        """Asked at the begin and at the end of a step."""
        self.count += self.each
        return self.count

    def keep(self) -> bool:
        self.kept += 1
        self.each = self.after
        return True


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Heap]:
    def make(before: int, after: int) -> Heap:
        made = Heap(before, after)
        monkeypatch.setattr(heap, "why_not_kept", lambda: None)
        monkeypatch.setattr(heap, "page_faults", made.page_faults)
        monkeypatch.setattr(heap, "keep_freed_memory", made.keep)
        return made

    return make


def run(watch: HeapWatch, steps: int, disturbed: tuple[int, ...] = ()) -> list[int]:
    """The steps after which memory was kept."""
    found = []
    for step in range(1, steps + 1):
        watch.begin_step()
        if watch.end_step(disturbed=step in disturbed):
            found.append(step)
    return found


def test_many_faults_in_each_step_are_ended_once(made_up: Callable[[int, int], Heap]) -> None:
    machine, watch = made_up(900, 3), HeapWatch("cpu", wanted=True)
    assert run(watch, 30) == [4]
    assert (watch.before, watch.after, machine.kept, watch.is_watching) == (900, 3, 1, False)
    assert list(watch.in_words()) == [
        "steps took memory from the system anew, 900 page faults each; glibc was told to keep freed blocks "
        "of less than 32 MiB until the process ends: 3 page faults a step"
    ]


def test_few_faults_are_no_reason(made_up: Callable[[int, int], Heap]) -> None:
    machine, watch = made_up(MANY - 1, 0), HeapWatch("cpu", wanted=True)
    assert run(watch, 30) == []
    assert (machine.kept, watch.is_watching, list(watch.in_words())) == (0, False, [])


@pytest.mark.parametrize(("third", "kept"), [(3 * MANY, 1), (3 * MANY - 3, 0)])
def test_it_is_the_average_that_counts(made_up: Callable[[int, int], Heap], third: int, kept: int) -> None:
    machine, watch = made_up(0, 0), HeapWatch("cpu", wanted=True)
    run(watch, 3)
    machine.each = third
    run(watch, 1)
    assert machine.kept == kept


def test_steps_that_compile_or_are_recorded_do_not_count(made_up: Callable[[int, int], Heap]) -> None:
    assert made_up(900, 3).kept == 0
    assert run(HeapWatch("cpu", wanted=True), 12, disturbed=(2, 4, 5)) == [7]


def test_what_is_left_is_told_with_the_remedy(made_up: Callable[[int, int], Heap]) -> None:
    made_up(900, 800)
    watch = HeapWatch("cpu", wanted=True)
    run(watch, 30)
    told = list(watch.in_words())
    assert len(told) == 2
    assert told[1].startswith("800 page faults a step are left")
    assert "MALLOC_MMAP_THRESHOLD_" in told[1]


@pytest.mark.parametrize(("device", "wanted"), [("cuda", True), ("cpu", False)])
def test_elsewhere_nothing_is_counted(made_up: Callable[[int, int], Heap], device: str, wanted: bool) -> None:
    machine = made_up(900, 3)
    assert run(HeapWatch(device, wanted=wanted), 30) == []
    assert machine.count == 0


class TestInTraining:
    def test_it_is_told_and_earlier_steps_do_not_count(self, made_up: Callable[[int, int], Heap]) -> None:
        machine = made_up(900, 3)
        callback = HotCompile(store=None, on_error="raise")
        fit(seeded(Net), [callback], max_epochs=2)
        report = callback.report
        assert machine.kept == 1
        (event,) = (e for e in report.events if e["kind"] == "freed_memory_kept")
        assert (event["faults"], event["step"] <= 6) == (900, True)
        assert any("3 page faults a step" in note for note in report.notes)
        assert report.eager_ms is not None
        assert report.eager_ms.n <= 24 - event["step"]

    @pytest.mark.parametrize("options", [{"keep_freed_memory": False}], ids=str)
    def test_not_if_it_is_not_wanted(
        self, made_up: Callable[[int, int], Heap], options: dict[str, Any]
    ) -> None:
        machine = made_up(900, 3)
        callback = HotCompile(store=None, on_error="raise", **options)
        fit(seeded(Net), [callback], max_epochs=2)
        assert machine.kept == 0

    def test_not_if_glibc_cannot_be_told(
        self, made_up: Callable[[int, int], Heap], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made_up(900, 3)
        monkeypatch.setattr(heap, "keep_freed_memory", lambda: False)
        callback = HotCompile(store=None, on_error="raise")
        fit(seeded(Net), [callback], max_epochs=1)
        assert not any("page faults" in note for note in callback.report.notes)
