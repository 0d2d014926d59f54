"""What compiling once more would cost and save in what is left of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan import compile_cost
from lightning_hotcompile.plan.compile_cost import START_ON_ACCELERATOR_S
from lightning_hotcompile.plan.forecast import MOST_UNASKED, Decision, Expectation
from lightning_hotcompile.run import weighing
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.step_record import PairedUnits
from tests.hot import hot
from tests.models import Batches, Net, Small, fit, seeded
from tests.run.test_reporting import Stops
from tests.store.examples import profile, unmeasured


def twice_as_fast() -> Track:
    pairs = PairedUnits()
    for _ in range(10):
        pairs.add_unit(False, 0.02, False)
        pairs.add_unit(True, 0.01, False)
    signature = StepSignature("train", "a", (), b"", b"", "grad", (), "32", None)
    return Track(signature=signature, pairs=pairs)


def weighs(**given: Any) -> Weighing:
    """Compiling takes 5 s, an eager step 10 ms, and half of that is saved."""
    found = Weighing.__new__(Weighing)
    facts = {"step_s": 0.01, "wait_s": 0.0, "share": 1.0, "cost_gate": True, "min_speedup": 1.02, **given}
    found._ledger = SimpleNamespace(  # type: ignore[assignment]
        eager_step_s=facts["step_s"], wait_s=facts["wait_s"]
    )
    found._config = SimpleNamespace(  # type: ignore[assignment]
        cost_gate=facts["cost_gate"], min_speedup=facts["min_speedup"]
    )
    found._watch = SimpleNamespace(share_of=lambda _: facts["share"])  # type: ignore[assignment]
    found._assumed = lambda *_: SimpleNamespace(compile_s=5.0)  # type: ignore[assignment, method-assign, return-value]
    found._trainer, found._stage = None, "train"  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("left", "pays"), [(None, True), (10_000, True), (1001, True), (999, False), (0, False)]
)
def test_a_recompile_pays_if_what_is_left_saves_more_than_it_costs(
    left: int | None, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    assert weighs().recompile_pays(twice_as_fast()) is pays


def test_without_a_forecast_or_a_measure_it_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: 1)
    unmeasured = twice_as_fast()
    unmeasured.pairs = PairedUnits()
    assert weighs(cost_gate=False).recompile_pays(twice_as_fast())
    assert weighs(min_speedup=0).recompile_pays(twice_as_fast())
    assert weighs(step_s=None).recompile_pays(twice_as_fast())
    assert weighs().recompile_pays(unmeasured)


@pytest.mark.parametrize(("wait_s", "pays"), [(0.0, True), (0.03, False)])
def test_of_a_time_that_is_left_steps_have_what_does_not_go_by_between_them(
    wait_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *given: int(30.0 / given[-1]))
    assert weighs(wait_s=wait_s).recompile_pays(twice_as_fast()) is pays


@pytest.mark.parametrize(("left", "pays"), [(2002, True), (1998, False), (None, True)])
def test_of_what_is_left_a_kind_of_step_has_its_share(
    left: int | None, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    assert weighs(share=0.5).recompile_pays(twice_as_fast()) is pays


def test_steps_of_two_kinds_in_turns_do_not_both_have_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Expectation] = []

    def forecast(expected: Expectation, **_: Any) -> Decision:
        asked.append(expected)
        return Decision(go=False, reason="not today")

    monkeypatch.setattr(weighing, "forecast", forecast)
    monkeypatch.setattr(Weighing, "too_short", lambda *_: None)
    callback = hot(cost_gate=True, dynamic=False, compile_optimizer=False)
    fit(seeded(Net), [callback], train=DataLoader(Batches([8, 4] * 10), batch_size=None), max_epochs=1)
    assert [expected.share for expected in asked] == [0.5, 0.5]


LEFT_AND_LATE = [(None, False), (10_000, False), (200, False), (100, True), (0, True)]


def after_a_child(*, has_compiled: bool, **given: Any) -> Weighing:
    """Compiling takes 5 s by the prior, and half of each step is saved; nothing is known of other runs."""
    found = weighs(**given)
    found._flip = SimpleNamespace(  # type: ignore[assignment]
        ahead=SimpleNamespace(prewarm=SimpleNamespace(has_compiled=has_compiled))
    )
    found._memory = SimpleNamespace(  # type: ignore[assignment]
        of=lambda _: None, forgone_s=lambda _: 0.0, is_lasting=lambda _: False
    )
    found._plan = SimpleNamespace(name="step")  # type: ignore[assignment]
    found._assumed = lambda *_: Expectation(compile_s=5.0, speedup=2.0)  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(("left", "late"), LEFT_AND_LATE)
def test_what_a_child_has_compiled_is_loaded_if_what_is_left_saves_more_than_that_takes(
    left: int | None, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    decision = after_a_child(has_compiled=True).too_late(twice_as_fast())
    assert (decision is not None) is late
    assert decision is None or (not decision.go and "its code is there: not worth it" in decision.reason)
    assert after_a_child(has_compiled=True, cost_gate=False).too_late(twice_as_fast()) is None
    assert after_a_child(has_compiled=True, step_s=None).too_late(twice_as_fast()) is None


def test_after_a_child_a_kind_of_step_has_its_share_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: 200)
    decision = after_a_child(has_compiled=True, share=0.5).too_late(twice_as_fast())
    assert decision is not None
    assert "100 steps of this kind, 10 ms each, are left" in decision.reason


def beside_a_child(*, beside_s: float | None, elapsed_s: float = 1.0, **given: Any) -> Weighing:
    """The same, with a child that is expected to take 4 s."""
    found = after_a_child(has_compiled=False, **given)
    found._ledger.beside_child_s = beside_s  # type: ignore[misc]
    child = SimpleNamespace(is_slowing=given.get("is_slowing", True), elapsed_s=elapsed_s)
    found._flip = SimpleNamespace(ahead=SimpleNamespace(prewarm=child, crowding=1.5))  # type: ignore[assignment]
    found._memory.child_s = lambda *_: 4.0  # type: ignore[method-assign]
    found._watch.op_statistics = None  # type: ignore[misc]
    return found


def second_thought(weighing: Weighing) -> Decision | None:
    answers = [weighing.too_dear(twice_as_fast()) for _ in range(32)]
    assert not any(answers[:15]), "asked now and then only"
    return next(filter(None, answers), None)


# Of 9 s 3 are over with the child: the rest saves 3 s; loading takes 0.75 s, and a compile in the step 5 s.
@pytest.mark.parametrize(
    ("beside_s", "left", "dear"),
    [(0.011, 900, False), (0.1, 900, True), (0.1, 4000, False), (None, 900, False), (0.1, None, False)],
)
def test_a_child_is_stopped_if_training_falls_behind_by_more_than_is_saved(
    beside_s: float | None, left: int | None, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    decision = second_thought(beside_a_child(beside_s=beside_s))
    assert (decision is not None) is dear
    if decision is not None:
        assert not decision.go
        assert "since steps took 100 ms beside it: not worth it: 900 steps" in decision.reason
    for given in ({"cost_gate": False}, {"step_s": None}, {"is_slowing": False}):
        assert second_thought(beside_a_child(beside_s=beside_s, **given)) is None


@pytest.mark.parametrize(("elapsed_s", "dear"), [(1.0, True), (3.5, False), (20.0, True)])
def test_what_a_child_has_cost_is_spent_and_one_that_is_overdue_is_not_soon_over(
    elapsed_s: float, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: 900)
    assert (second_thought(beside_a_child(beside_s=0.1, elapsed_s=elapsed_s)) is not None) is dear


@pytest.mark.parametrize(("left", "late"), [(1001, False), (999, True)])
def test_after_a_child_that_compiled_nothing_a_whole_compile_is_weighed(
    left: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    decision = after_a_child(has_compiled=False).too_late(twice_as_fast())
    assert (decision is not None) is late
    assert decision is None or "no code yet: not worth it" in decision.reason


class TestFirstFlipOnAnAccelerator:
    def weighs(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Weighing:
        facts = {"device": "cuda", "backend": "inductor", "graphs": 0, "known": None, **given}
        monkeypatch.setattr(weighing, "device_type", lambda _: facts["device"])
        monkeypatch.setattr(weighing, "graph_count", lambda: facts["graphs"])
        found = Weighing.__new__(Weighing)
        found._trainer = SimpleNamespace(lightning_module=None)  # type: ignore[assignment]
        found._config = SimpleNamespace(backend=facts["backend"])  # type: ignore[assignment]
        found._watch = SimpleNamespace(op_statistics=None)  # type: ignore[assignment]
        found._plan = SimpleNamespace(name="step")  # type: ignore[assignment]
        found._memory = SimpleNamespace(  # type: ignore[assignment]
            expectation=lambda *_: Expectation(compile_s=10.0, speedup=1.2)
        )
        return found

    def test_it_takes_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.weighs(monkeypatch)._assumed(None, 0.01).cost_s == 10.0 + START_ON_ACCELERATOR_S

    @pytest.mark.parametrize("changes", [{"device": "cpu"}, {"backend": "aot_eager"}, {"graphs": 1}])
    def test_not_where_a_compiler_was_started_or_there_is_none(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        assert self.weighs(monkeypatch, **changes)._assumed(None, 0.01).cost_s == 10.0

    def test_what_an_earlier_run_took_holds_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known, unknown = (cast(Profile, SimpleNamespace(compile_s=s)) for s in (8.0, None))
        assert self.weighs(monkeypatch)._assumed(known, 0.01).start_s == 0.0
        assert self.weighs(monkeypatch)._assumed(unknown, 0.01).start_s == START_ON_ACCELERATOR_S

    def test_a_graph_that_was_captured_for_a_child_process_is_no_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = self.weighs(monkeypatch)
        assert first._assumed(None, 0.01).start_s == START_ON_ACCELERATOR_S
        monkeypatch.setattr(weighing, "graph_count", lambda: 1)
        assert first._assumed(None, 0.01).start_s == START_ON_ACCELERATOR_S


class TestStepsOfAKnownPlan:
    """The run has had one step, of 10.5 ms; an earlier run has measured 4 ms beside a gain."""

    def decide(self, left: int, known: Profile | None, monkeypatch: pytest.MonkeyPatch) -> Decision:
        monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
        found = weighs(step_s=0.0105)
        found._config = HotCompileConfig()
        found._ledger.spent_s = 0.0105  # type: ignore[misc]
        found.known = lambda _: known  # type: ignore[method-assign]
        found._expectation = lambda *_: Expectation(  # type: ignore[method-assign]
            compile_s=1.2, speedup=1.12, measured=True
        )
        return found.forecast(twice_as_fast())

    @pytest.mark.parametrize(("left", "go"), [(2000, False), (2850, True)])
    def test_they_take_what_they_took_where_the_gain_was_measured(
        self, left: int, go: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decision = self.decide(left, profile(eager_s=0.004), monkeypatch)
        assert decision.go is go
        assert f"{left:,} steps of 4 ms are left, at the measured speed-up of 1.12x" in decision.reason

    @pytest.mark.parametrize("known", [None, profile(eager_s=None), unmeasured(eager_s=0.004)])
    def test_without_a_measured_gain_they_take_what_this_run_has_seen(
        self, known: Profile | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "2,000 steps of 10.5 ms are left" in self.decide(2000, known, monkeypatch).reason


def test_a_run_that_waits_is_not_asked_before_each_step_whether_it_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 1e6)
    asked = []
    forecast = Weighing.forecast

    def counted(weighing: Weighing, track: Track) -> Decision:
        asked.append(track.steps)
        return forecast(weighing, track)

    monkeypatch.setattr(Weighing, "forecast", counted)
    fit(seeded(Small), [Stops(150), hot(cost_gate=True, on_error="raise")], max_epochs=-1)
    assert asked == list(range(asked[0], 150, MOST_UNASKED))
    assert len(asked) == 3
