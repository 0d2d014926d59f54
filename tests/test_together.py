"""How a session moves with others: one real training, and a second rank that is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_hotcompile import HotCompile, Report
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.run import session
from lightning_hotcompile.swap.ranks import Proposal, Ranks
from lightning_hotcompile.together import Together
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

Other = Callable[[Proposal, int], Proposal]


class Asked(Ranks):
    """Remembers how long each exchange may take; the other rank never answers."""

    def __init__(self) -> None:
        super().__init__(limit_s=30.0)
        self.world_size, self.timeout_s = 2, 600.0
        self.limits: list[float | None] = []

    @property
    def rank(self) -> int:
        return 0

    def exchange(self, proposal: Proposal, limit_s: float | None = None) -> list[Proposal]:
        self.limits.append(limit_s)
        return [replace(proposal, rank=1, phase=proposal.without_all, reason="did not answer")]


@pytest.mark.parametrize("phase", list(Phase))
def test_without_an_answer_it_ends_as_far_as_it_had_come(phase: Phase) -> None:
    ranks = Asked()
    together = Together(ranks, "abc")
    together.state = State(phase=phase)
    agreed = together.exchange(State(phase=Phase.SETTLING), 7)
    end = "reverted" if phase.uses_compiled_code else "declined"
    if phase.value == end:
        assert agreed is None
    else:
        assert agreed is not None
        assert (agreed.phase, agreed.reason) == (end, "rank 1: did not answer")
    assert ranks.limits == [None], "as long as the ranks wait as a rule"
    assert not together.is_due(7), "once per batch"


def test_after_compiling_it_waits_as_long_as_a_collective() -> None:
    ranks = Asked()
    Together(ranks, "abc").exchange(State(phase=Phase.FLIPPING), 7, compiled=True)
    assert ranks.limits == [600.0]


def test_an_error_while_all_compile_is_told_before_the_same_batch() -> None:
    ranks = Asked()
    together = Together(ranks, "abc")
    together.exchange(State(phase=Phase.FLIPPING), 7)
    together.state = State(phase=Phase.FLIPPING)
    together.answer_for("our own bug", 7)
    assert len(ranks.limits) == 1, "told already before this batch"
    together.begin_compile()
    together.answer_for("our own bug", 7)
    assert len(ranks.limits) == 2
    together.answer_for("our own bug", 7)
    assert (len(ranks.limits), together.state.phase) == (2, Phase.REVERTED)


class Pair(Ranks):
    """Rank 0 of two; what the other one proposes is made from our own proposal and its number."""

    other: Other
    proposals: list[Proposal]

    def __init__(self, interval: int = 10, **_: Any) -> None:
        super().__init__(interval)
        self.world_size = 2

    @property
    def rank(self) -> int:
        return 0

    def exchange(self, proposal: Proposal, limit_s: float | None = None) -> list[Proposal]:
        self.proposals.append(proposal)
        return [proposal, replace(self.other(proposal, len(self.proposals)), rank=1)]


def train(
    monkeypatch: pytest.MonkeyPatch, other: Other, callback: HotCompile | None = None, epochs: int = 8
) -> tuple[Report, list[Proposal], Net]:
    pair = type("Two", (Pair,), {"other": staticmethod(other), "proposals": []})
    monkeypatch.setattr(session, "Ranks", pair)
    plain, model = seeded(Net), seeded(Net)
    callback = callback or hot(scope="regions")
    fit(plain, max_epochs=epochs)
    fit(model, [callback], max_epochs=epochs)
    assert_same(plain, model)
    assert not {"training_step", "log"} & vars(model).keys()
    return callback.report, pair.proposals, model


def phases(report: Report) -> list[tuple[int, str]]:
    return [(e["step"], e["phase"]) for e in report.events if e["kind"] == "phase_changed"]


def same(ours: Proposal, number: int) -> Proposal:
    return ours


def test_with_one_that_wants_the_same_it_goes_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _, _ = train(monkeypatch, same)
    assert [phase for _, phase in phases(report)] == ["flipping", "settling", "steady"]
    assert_proven(report)


def test_with_one_that_never_wants_to_all_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    report, proposals, _ = train(
        monkeypatch, lambda ours, n: replace(ours, phase="observing"), hot(scope="regions"), epochs=2
    )
    assert (report.phase, phases(report), report.regions) == ("observing", [], ())
    assert {p.phase for p in proposals[1:]} == {"flipping"}
    assert len(proposals) == 8  # batches 0, 3, 6 ... 21: one exchange per threshold, not per batch


def test_one_that_is_ready_later_makes_us_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(ours: Proposal, number: int) -> Proposal:
        return replace(ours, phase="observing") if number < 4 else ours

    report, _, _ = train(monkeypatch, later)
    first, phase = phases(report)[0]
    assert (first, phase) == (9, "flipping")
    assert report.phase == "steady"


def test_one_that_has_a_child_process_makes_us_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles_ahead(ours: Proposal, number: int) -> Proposal:
        compiling = ours.phase == "flipping" and number < 5
        return replace(ours, phase="prewarming", reason="worth it there") if compiling else ours

    report, proposals, _ = train(monkeypatch, compiles_ahead)
    first, second, *rest = phases(report)
    assert [first, second] == [(3, "prewarming"), (30, "flipping")]  # asked again at batches 10, 20, 30
    assert [phase for _, phase in rest] == ["settling", "steady"]
    assert [p.phase for p in proposals[1:5]] == ["flipping"] * 4
    assert_proven(report)


def test_one_that_gives_up_while_its_child_compiles_ends_it_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(ours: Proposal, number: int) -> Proposal:
        phase = {2: "prewarming", 3: "declined"}.get(number, ours.phase)
        return replace(ours, phase=phase, reason="out of memory")

    report, proposals, _ = train(monkeypatch, gives_up, epochs=3)
    assert phases(report) == [(3, "prewarming"), (10, "declined")]
    assert (report.reason, len(proposals)) == ("rank 1: out of memory", 3)


@pytest.mark.parametrize("end", ["declined", "reverted"])
def test_one_that_ends_in_the_middle_of_settling_ends_it_for_us(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def ends(ours: Proposal, number: int) -> Proposal:
        settling = ours.phase in ("settling", "steady")
        return replace(ours, phase=end, reason="out of memory") if settling and number > 6 else ours

    report, proposals, _ = train(monkeypatch, ends)
    assert (report.phase, report.reason) == (end, "rank 1: out of memory")
    number = len(proposals)
    assert proposals[number - 1].phase in ("settling", "steady"), "nothing is exchanged after the end"


def test_another_plan_is_declined_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    report, proposals, _ = train(monkeypatch, lambda ours, n: replace(ours, plan_digest="f00"))
    assert report.phase == "declined"
    assert "different plans" in report.reason
    assert "f00 on rank 1" in report.reason
    assert (report.compile_s, report.regions) == (0.0, ())
    assert proposals[-1].phase == "flipping"


def test_exchanges_stop_once_it_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    report, proposals, _ = train(monkeypatch, same)
    assert report.phase == "steady"
    assert proposals[-1].phase == "steady"
    assert len([p for p in proposals if p.phase == "steady"]) == 1


def test_a_verdict_is_not_forgotten_while_the_other_rank_makes_up_its_mind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_to_decide(ours: Proposal, number: int) -> Proposal:
        # Rank 1 had more disturbed pairs: it reaches each of its looks one exchange after us.
        wanted = [p.phase for p in seen]
        seen.append(ours)
        return replace(ours, phase="settling") if ours.phase == "steady" and "steady" not in wanted else ours

    seen: list[Proposal] = []
    report, proposals, _ = train(monkeypatch, slow_to_decide, epochs=5)
    first = next(i for i, p in enumerate(proposals) if p.phase == "steady")
    assert proposals[first + 1].phase == "steady", "asked again, rank 0 still knows that it is faster"
    assert report.phase == "steady"


def test_a_storm_of_recompiles_in_steady_state_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_hotcompile.tracks import Track

    ran, calls = Track.ran, []

    def fails_late(track: Track, **how: Any) -> None:
        ran(track, **how)
        calls.append(track.phase.value)
        if calls.count("steady") == 5:
            track.failure = "compiled code did not fit"

    monkeypatch.setattr(Track, "ran", fails_late)
    report, _, _ = train(monkeypatch, same)
    assert report.phase == "reverted"
    assert "did not fit" in report.reason
