"""All ranks change together: the rule, without any process."""

from __future__ import annotations

import itertools
import pickle
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.swap import ranks as module
from lightning_hotcompile.swap.meeting import Meeting
from lightning_hotcompile.swap.ranks import LONGEST_WAIT_S, Proposal, Ranks, agree
from tests.swap.test_meeting import World


def proposals(*phases: str, digests: str | None = None, reason: str = "why") -> list[Proposal]:
    digests = digests or "a" * len(phases)
    return [
        Proposal(rank=i, phase=phase, reason=reason, plan_digest=digest)
        for i, (phase, digest) in enumerate(zip(phases, digests, strict=True))
    ]


@pytest.mark.parametrize("current", ["observing", "flipping", "settling"])
def test_all_that_want_to_stay_stay(current: str) -> None:
    assert agree(proposals(current, current, current), current) is None


@pytest.mark.parametrize(
    ("current", "wanted"),
    [("observing", "flipping"), ("flipping", "settling"), ("settling", "steady"), ("reverted", "flipping")],
)
def test_all_that_want_the_same_do_it(current: str, wanted: str) -> None:
    given = proposals(wanted, wanted)
    assert agree(given, current) == given[0]


@pytest.mark.parametrize(
    ("current", "wanted"), [("observing", "flipping"), ("flipping", "settling"), ("settling", "steady")]
)
def test_one_that_is_not_ready_makes_all_wait(current: str, wanted: str) -> None:
    for given in itertools.permutations([wanted, wanted, current]):
        assert agree(proposals(*given), current) is None


@pytest.mark.parametrize("given", [*itertools.permutations(["prewarming", "flipping", "flipping"])])
def test_one_that_lets_a_child_compile_makes_all_wait_for_it(given: tuple[str, ...]) -> None:
    ready = agree(proposals(*given), "observing")
    assert ready is not None
    assert (ready.phase, ready.rank) == ("prewarming", given.index("prewarming"))
    assert agree(proposals(*given), "prewarming") is None
    done = agree(proposals("flipping", "flipping", "flipping"), "prewarming")
    assert done is not None
    assert done.phase == "flipping"


def test_plans_are_compared_before_a_child_compiles_them() -> None:
    agreed = agree(proposals("prewarming", "flipping", digests="ab"), "observing")
    assert agreed is not None
    assert agreed.phase == "declined"


@pytest.mark.parametrize("end", ["declined", "reverted"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_that_ends_decides_for_all_and_is_named(end: str, rank: int) -> None:
    phases = ["steady"] * 3
    phases[rank] = end
    agreed = agree(proposals(*phases, reason="out of memory"), "settling")
    assert agreed is not None
    assert (agreed.phase, agreed.reason) == (end, f"rank {rank}: out of memory")


def test_the_first_rank_that_ends_gives_the_reason() -> None:
    agreed = agree(proposals("settling", "reverted", "reverted"), "settling")
    assert agreed is not None
    assert agreed.reason == "rank 1: why"


def test_a_decline_goes_before_a_revert() -> None:
    agreed = agree(proposals("reverted", "declined"), "flipping")
    assert agreed is not None
    assert agreed.phase == "declined"


@pytest.mark.parametrize("end", ["declined", "reverted"])
def test_an_end_that_is_reached_already_is_nothing_new(end: str) -> None:
    assert agree(proposals(end, end), end) is None


def test_one_that_is_tried_again_while_another_is_not() -> None:
    assert agree(proposals("flipping", "reverted"), "reverted") is None


def test_different_plans_are_declined_with_both_digests() -> None:
    agreed = agree(proposals("flipping", "flipping", "flipping", digests="aab"), "observing")
    assert agreed is not None
    assert agreed.phase == "declined"
    assert "a on rank 0, b on rank 2" in agreed.reason
    assert "same model and options" in agreed.reason


def test_different_plans_do_not_matter_while_nothing_changes() -> None:
    assert agree(proposals("observing", "observing", digests="ab"), "observing") is None


def test_one_process_does_what_it_wants() -> None:
    for wanted in ("flipping", "settling", "steady"):
        assert agree(proposals(wanted), "observing") == proposals(wanted)[0]


def test_any_mixture_of_phases_gets_the_same_answer_on_every_rank() -> None:
    phases = [str(p) for p in Phase]
    for current, *wanted in itertools.product(phases, repeat=3):
        given = proposals(*wanted)
        agreed = agree(given, current)
        assert agreed == agree(pickle.loads(pickle.dumps(given)), current)
        if agreed is None:
            continue
        assert agreed.phase in wanted
        assert agreed.phase != current
        waits = agreed.phase == "prewarming" and set(wanted) == {"prewarming", "flipping"}
        assert agreed.phase in ("declined", "reverted") or set(wanted) == {agreed.phase} or waits


class TestRanks:
    def test_without_a_process_group_there_is_one(self) -> None:
        ranks = Ranks()
        assert (ranks.world_size, ranks.rank) == (1, 0)
        (only,) = proposals("flipping")
        assert ranks.exchange(only) == [only]

    @pytest.mark.parametrize(
        ("phase", "due"),
        [
            ("observing", [0, 4, 8, 12, 16]),
            ("flipping", list(range(20))),
            ("prewarming", [0, 10]),
            ("settling", [0, 10]),
            ("declined", []),
        ],
    )
    def test_when_proposals_are_exchanged(self, phase: str, due: list[int]) -> None:
        ranks = Ranks(interval=4)
        assert [step for step in range(20) if ranks.is_due(phase, step)] == due

    @pytest.mark.parametrize("interval", [0, -1])
    def test_threshold_zero_exchanges_at_each_batch(self, interval: int) -> None:
        assert all(Ranks(interval=interval).is_due("observing", step) for step in range(5))


class OneOf(Ranks):
    """Rank ``number`` of a world that is not there: the others are written into the store by hand."""

    def __init__(self, world: World, number: int, **options: Any) -> None:
        super().__init__(meeting=world.meeting(number), **options)
        self.world_size, self._number = world.size, number

    @property
    def rank(self) -> int:
        return self._number


def ranks_of(world: World, **options: Any) -> list[OneOf]:
    return [OneOf(world, number, **options) for number in range(world.size)]


def exchange_all(ranks: list[OneOf], given: list[Proposal]) -> list[list[Proposal]]:
    """All ranks exchange their proposals: the others come while rank 0 waits."""
    found: dict[int, list[Proposal]] = {}
    world = ranks[0]._meeting._pause.__self__  # type: ignore[union-attr]
    for rank in ranks[1:]:
        world.leaves_text(rank.rank, module._written([given[rank.rank]]))
    found[0] = ranks[0].exchange(given[0])
    for rank in ranks[1:]:
        found[rank.rank] = rank.exchange(given[rank.rank])
    return [found[rank.rank] for rank in ranks]


class Preempted(RuntimeError):
    """What a handler of signals raises: as torch's own does, where a worker that loads data has died."""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of POSIX systems")
def test_what_a_handler_of_signals_raises_is_no_answer_of_the_store() -> None:
    """It was taken for one while a rank waited for another, and training went on."""

    def end(*_: object) -> None:
        raise Preempted("the job ends")

    world, before = World(), signal.signal(signal.SIGUSR1, end)
    world.at(0.0, lambda: signal.raise_signal(signal.SIGUSR1))
    try:
        with pytest.raises(Preempted, match="the job ends"):
            OneOf(world, 0).exchange(proposals("flipping")[0])
    finally:
        signal.signal(signal.SIGUSR1, before)


class TestOverTheStore:
    @pytest.mark.parametrize(
        ("phases", "digests", "current"),
        [
            (("flipping", "flipping", "flipping"), "aaa", "observing"),
            (("flipping", "flipping", "flipping"), "aba", "observing"),
            (("flipping", "observing", "flipping"), "aaa", "observing"),
            (("settling", "reverted", "declined"), "aaa", "flipping"),
            (("steady", "steady", "settling"), "aaa", "settling"),
        ],
    )
    def test_all_ranks_agree_as_if_they_had_seen_everything(
        self, phases: tuple[str, ...], digests: str, current: str
    ) -> None:
        given = proposals(*phases, digests=digests)
        for found in exchange_all(ranks_of(World(size=3)), given):
            assert agree(found, current) == agree(given, current)

    def test_a_thousand_equal_proposals_are_told_once(self) -> None:
        given = proposals(*["steady"] * 1000)
        verdict = module._conclude(given[0], [module._written([p]) for p in given], 1.0)
        assert module._read(verdict) == given[:1]

    def test_any_text_is_carried_over_unchanged(self) -> None:
        given = proposals("flipping", "flipping", reason='"Größe" \\ {1: [2]}\n\0')
        assert exchange_all(ranks_of(World()), given) == [given[:1], given[:1]]

    @pytest.mark.parametrize("missing", [0, 1])
    @pytest.mark.parametrize("end", ["declined", "reverted"])
    def test_one_that_does_not_come_ends_it_for_all(self, missing: int, end: str) -> None:
        world = World()
        first, late = ranks_of(world, limit_s=30.0)[:: 1 if missing else -1]
        ours = replace(proposals("settling")[0], without_all=end, rank=first.rank)
        agreed = agree(first.exchange(ours), "settling")
        assert agreed is not None
        assert (agreed.phase, agreed.reason) == (end, f"rank {missing}: did not answer within 30 s")
        assert agree(late.exchange(replace(ours, rank=missing)), "settling") == agreed

    def test_all_that_do_not_come_are_named(self) -> None:
        agreed = agree(OneOf(World(size=4), 1).exchange(proposals("flipping")[0]), "observing")
        assert agreed is not None
        assert agreed.reason == "rank 0: did not answer within 120 s, nor did rank 2, 3"

    def test_one_exchange_may_have_a_limit_of_its_own(self) -> None:
        world = World()
        OneOf(world, 0, limit_s=30.0).exchange(proposals("flipping")[0], limit_s=500.0)
        assert 500.0 <= world.now < 501.0

    def test_a_store_that_has_gone_is_an_end(self) -> None:
        class Gone(Meeting):
            def hold(self, *_: Any, **__: Any) -> str:
                raise dist.DistNetworkError("connection reset\nstack of the server")

        rank = OneOf(World(), 1)
        rank._meeting = Gone(dist.HashStore(), 1, 2)
        (only,) = rank.exchange(proposals("observing", "settling")[1])
        assert (only.phase, only.rank) == ("declined", 1)
        assert only.reason == "the store of the process group does not answer: connection reset"

    @pytest.mark.parametrize(("reasons", "phase"), [((None, "no GPU"), "declined"), ((None, None), None)])
    def test_before_the_first_step_one_reason_is_a_reason_for_all(
        self, reasons: tuple[str | None, str | None], phase: str | None
    ) -> None:
        world, found = World(), []
        first, second = ranks_of(world)
        world.at(0.0, lambda: found.append(first.agree_to_watch("abc", reasons[0])))
        found.append(second.agree_to_watch("abc", reasons[1]))
        assert found == (["rank 1: no GPU"] * 2 if phase else [None, None])

    def test_a_rank_without_this_callback_is_a_reason_too(self) -> None:
        reason = OneOf(World(), 0, limit_s=5.0).agree_to_watch("abc", None)
        assert reason == "rank 1: did not answer within 5 s"

    @pytest.mark.parametrize("phase", ["steady", "declined", "reverted"])
    def test_at_rest_the_store_is_left_alone(self, phase: str) -> None:
        assert not any(Ranks(interval=1).is_due(phase, step) for step in range(1000))

    def test_without_a_store_it_is_a_collective(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rank, given = OneOf(World(), 0), proposals("flipping", "observing")
        rank._meeting = None
        monkeypatch.setattr(
            module.dist, "all_gather_object", lambda found, ours: found.__setitem__(slice(None), given)
        )
        assert rank.exchange(given[0]) == given


class TestHowLongItWaits:
    @pytest.mark.parametrize(
        ("timeout_s", "limit_s"), [(None, LONGEST_WAIT_S), (1800.0, LONGEST_WAIT_S), (60.0, 20.0), (6.0, 2.0)]
    )
    def test_never_longer_than_a_part_of_what_a_collective_may_take(
        self, timeout_s: float | None, limit_s: float
    ) -> None:
        ranks = Ranks()
        ranks.timeout_s = timeout_s
        assert ranks.limit_s == pytest.approx(limit_s)

    def test_a_limit_that_is_given_counts(self) -> None:
        assert Ranks(limit_s=3.5).limit_s == 3.5

    @pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
    def test_the_limit_of_the_process_group_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=45))
        try:
            monkeypatch.setattr(dist, "get_world_size", lambda: 2)
            ranks = Ranks()
        finally:
            dist.destroy_process_group()
        assert ranks.timeout_s == store.timeout.total_seconds()


@pytest.mark.parametrize(
    ("timeout_s", "asked", "allowed"),
    [
        (None, 600.0, 600.0),
        (None, None, None),
        (600.0, 600.0, 300.0),
        (600.0, 10.0, 10.0),
        (60.0, None, 30.0),
    ],
)
def test_a_compile_ends_before_the_other_ranks_give_up(
    timeout_s: float | None, asked: float | None, allowed: float | None
) -> None:
    ranks = Ranks()
    ranks.timeout_s = timeout_s
    assert ranks.within_timeout(asked) == allowed
