"""All ranks change together: the rule, without any process."""

from __future__ import annotations

import itertools
import pickle

import pytest

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.swap.ranks import Proposal, Ranks, agree


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
        assert agreed.phase in ("declined", "reverted") or set(wanted) == {agreed.phase}


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
