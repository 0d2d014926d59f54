"""Ranks that meet in a store: every order in which they can come, without a process and without waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hotcompile.swap import meeting as module
from lightning_hotcompile.swap.meeting import Meeting, store_of_processes, timeout_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed")

LIMIT_S = 30.0


class World:
    """A store, and a clock that moves only while somebody waits; others come at given times."""

    def __init__(self, size: int = 2) -> None:
        self.store = dist.HashStore()
        self.size = size
        self.now = 0.0
        self.pauses = 0
        self._coming: list[tuple[float, Callable[[], None]]] = []

    def meeting(self, rank: int, store: Any = None) -> Meeting:
        return Meeting(store or self.store, rank, self.size, now=lambda: self.now, pause=self._pause)

    def hold(self, rank: int, text: str = "", limit_s: float = LIMIT_S) -> list[str | None]:
        found: list[str | None] = json.loads(self.meeting(rank).hold(text or f"of {rank}", written, limit_s))
        return found

    def leaves_text(self, rank: int, text: str, number: int = 1) -> None:
        """What a rank does first when it comes."""
        self.store.set(Meeting._text(number, rank), text)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._coming.append((time, action))

    def _pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.pauses += 1
        assert self.pauses < 10_000, "waits for ever"
        due = [c for c in self._coming if c[0] <= self.now]
        self._coming = [c for c in self._coming if c not in due]
        for _, action in due:
            action()


def written(texts: Sequence[str | None]) -> str:
    return json.dumps(list(texts))


@pytest.mark.parametrize("late", [0.0, 0.01, 7.0, 29.9])
def test_rank_0_takes_the_texts_of_all_as_soon_as_they_are_there(late: float) -> None:
    world = World(size=3)
    world.leaves_text(1, "of 1")
    world.at(late, lambda: world.leaves_text(2, "of 2"))
    assert world.hold(0) == ["of 0", "of 1", "of 2"]
    assert late <= world.now <= late + 0.11


@pytest.mark.parametrize("late", [0.0, 0.01, 7.0, 29.9])
def test_another_rank_waits_for_the_verdict_of_rank_0(late: float) -> None:
    world, found = World(), []
    world.at(late, lambda: found.append(world.hold(0)))
    assert world.hold(1) == ["of 0", "of 1"]
    assert found == [["of 0", "of 1"]]
    assert late <= world.now <= late + 0.11


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waited_too_long_ends_it_with_those_that_came(rank: int) -> None:
    world = World(size=3)
    found = world.hold(rank)
    assert found == [f"of {r}" if r == rank else None for r in range(3)]
    assert LIMIT_S <= world.now < LIMIT_S + 0.2


@pytest.mark.parametrize(("early", "late"), [(0, 1), (1, 0)])
def test_who_comes_too_late_learns_that_the_other_went_on(early: int, late: int) -> None:
    world = World()
    first = world.hold(early)
    ended = world.now
    assert world.hold(late) == first
    assert first[late] is None
    assert world.now == ended, "there is nothing left to wait for"


def test_rank_0_stops_waiting_when_another_gave_up_before() -> None:
    world = World(size=3)  # rank 2 never comes, and rank 0 comes 20 s after rank 1
    found: list[Any] = []
    world.at(20.0, lambda: found.append(world.hold(0)))
    assert world.hold(1) == ["of 0", "of 1", None]
    assert found == [["of 0", "of 1", None]]
    assert world.now < 20 + LIMIT_S + 0.2


def test_rank_0_that_died_after_its_text_is_replaced() -> None:
    world = World()
    world.leaves_text(0, "of 0")
    assert world.hold(1) == ["of 0", "of 1"]


class Slow(Meeting):
    """Is overtaken between its look at the texts and its verdict."""

    overtaken: Callable[[], None]

    def _texts(self, number: int) -> list[str | None]:
        texts = super()._texts(number)
        type(self).overtaken()
        return texts


def test_the_verdict_that_is_written_first_counts_for_all() -> None:
    world = World()
    other = world.meeting(0)
    Slow.overtaken = staticmethod(lambda: world.store.set(other._verdict(1), written(["first"])))  # type: ignore
    slow = Slow(world.store, 1, 2, now=lambda: world.now, pause=world._pause)
    assert json.loads(slow.hold("of 1", written, 0.0)) == ["first"]


def test_the_next_meeting_knows_nothing_of_the_last_one() -> None:
    world = World()
    for number in range(1, 4):
        world.leaves_text(1, f"text {number} of 1", number)
        assert world.hold(0, f"text {number} of 0") == [f"text {number} of {r}" for r in (0, 1)]


def test_what_is_left_in_the_store_does_not_grow() -> None:
    world, sizes = World(), []
    for _ in range(30):
        world.at(world.now, lambda: world.hold(0))
        world.hold(1)
        sizes.append(world.store.num_keys())
    assert sizes[2:] == [sizes[2]] * 28
    assert sizes[2] == 2 + 2 * 3  # the counters, and two meetings


class CannotDelete:
    """Some kinds of store refuse to."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError("not supported")


def test_a_store_that_cannot_delete_is_good_enough() -> None:
    world = World()
    for number in range(1, 5):
        world.leaves_text(1, "of 1", number)
        meeting = world.meeting(0, CannotDelete(world.store))
        assert json.loads(meeting.hold("of 0", written, LIMIT_S)) == ["of 0", "of 1"]


def test_threads_that_meet_at_the_same_moment_agree() -> None:
    store, size, found = dist.HashStore(), 4, {}

    def meet(rank: int) -> None:
        meeting = Meeting(store, rank, size)
        found[rank] = [meeting.hold(f"{n} of {rank}", written, 20.0) for n in range(20)]

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {
        r: [written([f"{n} of {i}" for i in range(size)]) for n in range(20)] for r in range(size)
    }


class TestWhatTorchPromises:
    """Each line of the class above leans on one of these."""

    @pytest.fixture(params=["hash", "tcp", "file"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Any) -> Any:
        if request.param == "tcp":
            return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20))
        return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), 1)

    def test_a_counter_starts_at_one(self, store: Any) -> None:
        assert [store.add("n", 1), store.add("n", 1)] == [1, 2]

    def test_an_empty_expectation_writes_only_what_is_not_there(self, store: Any) -> None:
        assert store.compare_set("v", "", "first") == b"first"
        assert store.compare_set("v", "", "second") == b"first"
        assert store.get("v") == b"first"

    def test_check_is_about_all_keys_and_does_not_wait(self, store: Any) -> None:
        store.set("a", "1")
        assert store.check(["a"])
        assert not store.check(["a", "b"])

    def test_several_are_read_in_order(self, store: Any) -> None:
        store.set("a", "1")
        store.set("b", "2")
        assert store.multi_get(["b", "a"]) == [b"2", b"1"]

    def test_a_key_can_be_removed(self, store: Any) -> None:
        store.set("a", "1")
        assert store.delete_key("a")
        assert not store.check(["a"])


@pytest.fixture
def alone() -> Any:
    """A process group of one, with a time limit of 45 s."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=45))
    yield store
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
class TestTheStoreOfTheProcesses:
    def test_it_is_found(self, alone: Any) -> None:
        found = store_of_processes()
        assert found is not None
        assert json.loads(Meeting(found, 0, 1).hold("hello", written, 1.0)) == ["hello"]
        assert alone.num_keys() > 0

    def test_there_is_none_where_torch_hands_out_none(
        self, alone: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module.dist, "group", type("group", (), {"WORLD": object()}))
        assert store_of_processes() is None

    def test_there_is_none_under_mpi(self, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.dist, "get_backend", lambda: "mpi")
        assert store_of_processes() is None


def test_a_store_knows_the_time_limit_of_its_processes() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(minutes=10))
    assert timeout_of(store) == 600.0
