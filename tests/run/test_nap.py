"""Steps at rest are slept through: a nap must end where something is different, and lose nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.run.nap import CALM, CALM_EAGER, LOOKS_AFTER_ANOTHER, NAP
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.tracks import SOON
from tests.hot import STEP, assert_proven, hot
from tests.made_up_machine import Ticks
from tests.models import Batches, Small, fit, loader, make_trainer, seeded


class Looks(list[int]):
    """The steps that were looked at, and their session."""

    session: Session


@pytest.fixture
def considered(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What is considered in the trainings of a test."""
    steps = Looks()
    original = Session.consider_step

    def consider(session: Session, *args: Any) -> None:
        steps.append(session.steps)
        steps.session = session
        original(session, *args)

    monkeypatch.setattr(Session, "consider_step", consider)
    return steps


def train(sizes: list[int], callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    trainer = make_trainer(callbacks, max_epochs=1, max_steps=-1, limit_train_batches=len(sizes), **options)
    trainer.fit(seeded(Small), DataLoader(Batches(sizes), batch_size=None))
    return trainer


def steady_since(callback: Any) -> int:
    """The step at which a callback began to be steady."""
    assert callback.report.phase == "steady"
    step: int = next(e["step"] for e in callback.report.events if e.get("phase") == "steady")
    return step


def test_most_steps_at_rest_are_slept_through(considered: Looks) -> None:
    callback = hot()
    train([8] * 500, [callback])
    awake = [step for step in considered if step > steady_since(callback) + CALM]
    assert 1 <= len(awake) <= 3 + 500 // (NAP + 1)


def test_where_nothing_is_compiled_naps_begin_sooner(considered: Looks) -> None:
    callback = hot(cost_gate=True)
    train([8] * 120, [callback])
    (declined,) = (e["step"] for e in callback.report.events if e["kind"] == "declined")
    assert callback.report.phase == "declined"
    awake = [step for step in considered if step > declined + CALM_EAGER]
    assert 1 <= len(awake) <= 1 + 120 // (NAP + 1)
    assert callback.report.steps == sum(phase.steps for phase in callback.report.phases) == 120


def test_no_step_is_lost_in_the_books(considered: Looks) -> None:
    callback = hot(**STEP)
    train([8] * 400, [callback])
    report = callback.report
    assert report.steps == 400
    assert sum(phase.steps for phase in report.phases) == 400
    assert len(considered) < 250


def test_each_step_since_the_comparison_is_counted_as_compiled(considered: Looks) -> None:
    callback = hot(**STEP)
    train([8] * 300, [callback])
    (track,) = considered.session.watch.tracks
    assert track.steps == 300
    assert track.compiled_steps >= 300 - steady_since(callback)
    assert track.misses == 0


def test_an_odd_batch_in_a_nap_runs_eagerly_and_ends_it(considered: Looks) -> None:
    sizes = [8] * 320
    sizes[237] = sizes[239] = 5  # in a nap, and among the looks after it
    callback = hot(dynamic=False, **STEP)
    train(sizes, [callback])
    assert steady_since(callback) + CALM < 237
    assert 237 not in considered
    assert callback.report.recompiles == 0
    steps = {track.steps: track.compiled_steps > 0 for track in considered.session.watch.tracks}
    assert steps == {319: True, 1: False}  # the second one was looked at
    assert set(range(238, 238 + LOOKS_AFTER_ANOTHER)) <= set(considered)


def test_code_that_fits_no_longer_is_compiled_again_after_a_few_steps(considered: Looks) -> None:
    class Changes(Small):
        factor = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.factor

        def on_train_batch_start(self, *_: Any) -> None:
            self.factor = 1.0 if self.trainer.global_step < 240 else 0.5

    callback = hot(**STEP)
    fit(seeded(Changes), [callback], train=loader(8 * 400), max_steps=400)
    (track,) = considered.session.watch.tracks
    assert callback.report.recompiles == 1
    assert 400 - track.compiled_steps <= steady_since(callback) + 8


def test_steps_are_looked_at_after_compiled_code_was_taken_back(considered: Looks) -> None:
    """Naps begin sooner where nothing is compiled, but not at once."""

    class TakesBack(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 240:
                considered.session.abandon_step()
                (track,) = considered.session.watch.tracks
                track.state = replace(track.state, phase=Phase.REVERTED, may_retry=False)

    callback = hot(**STEP)
    train([8] * 320, [callback, TakesBack()])
    assert callback.report.phase == "reverted"
    assert set(range(240, 240 + LOOKS_AFTER_ANOTHER)) <= set(considered)


def test_another_signature_after_a_steady_one_becomes_hot() -> None:
    callback = hot(dynamic=False, max_signatures=4, **STEP)
    train([8] * 300 + [12] * 90, [callback])
    detected = [e for e in callback.report.events if e["kind"] == "detected"]
    assert len(detected) == 2
    assert detected[1]["step"] <= 300 + NAP + callback.config.threshold + 1


def test_an_exception_in_a_compiled_nap_leaves_the_model_as_it_was(considered: Looks) -> None:
    class Raises(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, *_: Any) -> None:
            if self.trainer.global_step == 250:
                raise KeyError("mine")

    callback, model = hot(), seeded(Raises)
    with pytest.raises(KeyError, match="mine"):
        fit(model, [callback], train=loader(8 * 300), max_steps=300)
    assert considered.session.nap is None
    assert considered[-1] < 250 > steady_since(callback) + CALM
    assert 250 <= sum(phase.steps for phase in callback.report.phases) == callback.report.steps
    assert "training_step" not in vars(model)
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Freezes(Small):
    """The first block is trained for 240 steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[0].requires_grad_(self.trainer.global_step < 240)


def test_a_model_whose_flags_change_in_a_nap_is_right() -> None:
    """Compiled code has guards on them: the step runs eagerly, and as a signature of its own from then on."""
    weights, callback = [], hot(dynamic=False)
    for callbacks in ([], [callback]):
        model = seeded(Freezes)
        fit(model, callbacks, train=loader(8 * 300), max_steps=300)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)
    assert_proven(callback.report)
    assert [r.graphs for r in callback.report.regions] == [2, 2]


def test_a_step_that_fits_nothing_ends_a_nap(considered: Looks) -> None:
    callback = hot(dynamic=False, **STEP, max_signatures=1)
    fit(seeded(Freezes), [callback], train=loader(8 * 300), max_steps=300)
    before, after = considered.session.watch.tracks
    assert before.misses <= 1
    assert abs(after.steps - 60) <= 2


@pytest.mark.parametrize("since", [8, 20, 100])
def test_a_stance_that_forces_eager_for_a_while_ends_nothing(since: int, considered: Looks) -> None:
    class Forces(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step in (since, since + 40):
                torch.compiler.set_stance("force_eager" if trainer.global_step == since else "default")

    callback = hot(**STEP)
    try:
        train([8] * 500, [Forces(), callback])
    finally:
        torch.compiler.set_stance("default")
    assert callback.report.phase == "steady"
    runs = callback.report.regions[0].runs
    assert 500 - since - 40 - 2 * NAP < runs <= 500 - 40


def test_steps_are_slept_through_after_all_has_failed(considered: Looks) -> None:
    """Those that had compiled code do not come back, so nobody takes it out."""
    made: list[Any] = []

    def only_the_first_works(graph: Any, inputs: Any, **_: Any) -> Any:
        made.append(graph)
        if len(made) > 1:
            raise RuntimeError("no such instruction")
        return graph.forward

    callback = hot(backend=only_the_first_works, on_error="eager", **STEP, dynamic=False)
    train([8] * 80 + [4] * 600, [callback])
    assert [e.get("phase") for e in callback.report.events].count("flipping") == 2
    assert len([step for step in considered if step > 200]) <= 2 + 480 // (NAP + 1)


def test_what_is_compiled_between_two_steps_is_not_the_steps(considered: Looks) -> None:
    class CompilesItsOwn(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 20:
                torch.compile(lambda x: x.sin() * 2, backend="eager")(torch.ones(3))

    callback = hot(backend="eager", **STEP)
    train([8] * 30, [callback, CompilesItsOwn()])
    assert [s.step for s in callback.report.samples if s.note == "stalled"] == [4]


def declined(**options: Any) -> Any:
    """A callback that compiles nothing, since it does not pay."""
    return hot(**{"cost_gate": True, "backend": "inductor", "store": None, **options})


def test_steps_that_stay_eager_are_slept_through_and_counted(considered: Looks) -> None:
    callback = declined()
    train([8] * 700, [callback])
    report = callback.report
    assert report.phase == "declined"
    assert report.steps == 700
    assert sum(phase.steps for phase in report.phases) == 700
    assert sum(track.steps for track in considered.session.watch.tracks) == 700
    assert len([step for step in considered if step > 300]) <= 2 + 400 // (NAP + 1)
    assert 700 - NAP <= report.samples[-1].step <= 700


@pytest.mark.parametrize("make", [lambda: hot(**STEP), declined], ids=["hot", "declined"])
def test_a_report_in_a_nap_is_up_to_date(considered: Looks, make: Any) -> None:
    seen: list[tuple[int, int]] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            report = callback.report
            seen.append((report.steps, sum(phase.steps for phase in report.phases)))

    callback = make()
    train([8] * 400, [callback, Reads()])
    assert seen == [(n, n) for n in range(1, 401)]
    assert len(considered) < 250


def test_another_signature_ends_the_naps(considered: Looks) -> None:
    callback = declined(dynamic=False)
    train([8] * 400 + [12] * 200, [callback])
    detected = [e["step"] for e in callback.report.events if e["kind"] == "detected"]
    assert len(detected) == 2
    assert 400 < detected[1] <= 400 + NAP + callback.config.threshold + 2
    assert callback.report.steps == 600


@pytest.mark.parametrize("pattern", [[8, 8, 8, 8, 12], [8, 12, 8, 8, 12, 8, 8]])
def test_compiled_code_goes_on_beside_a_signature_that_stays_eager(
    considered: Looks, pattern: list[int]
) -> None:
    callback = hot(dynamic=False, **STEP, max_signatures=1, threshold=2)
    train(([8] * 100 + [12] * 40) + pattern * 100, [callback])
    compiled, eager = sorted(considered.session.watch.tracks, key=lambda t: -t.compiled_steps)
    assert (str(compiled.phase), str(eager.phase)) == ("steady", "declined")
    in_turns = len(pattern) * 100
    share = sum(size == 8 for size in pattern) / len(pattern)
    assert compiled.compiled_steps > steady_in(100, callback) + 0.9 * share * in_turns


def steady_in(steps: int, callback: Any) -> int:
    """Of the first steps those that were compiled at least: all after the comparison."""
    return steps - steady_since(callback)


def test_waiting_at_the_end_of_an_epoch_is_no_time_of_compiled_steps(considered: Looks) -> None:
    class Waits(Ticks):
        def on_train_epoch_end(self, *_: Any) -> None:
            self.now += 1000.0

    callback = hot(**STEP)
    ticks = Waits()
    with ticks.in_sessions():
        fit(seeded(Small), [ticks, callback], train=loader(8 * 100), max_epochs=4)
    ledger = considered.session.ledger
    steady = next(phase for phase in callback.report.phases if phase.name == "steady")
    assert steady.steps > 300
    assert steady.total_s == pytest.approx(steady.steps, rel=0.05)
    assert ledger.spent_s == pytest.approx(400, rel=0.05)


def test_a_pause_in_a_nap_is_no_time_of_its_steps(considered: Looks) -> None:
    class Saves(Ticks):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.now += 1000.0 if trainer.global_step == 240 else 0.0

    callback, ticks = hot(**STEP), Saves()
    with ticks.in_sessions():
        fit(seeded(Small), [callback, ticks], train=loader(8 * 300), max_steps=300)
    assert not {239, 240, 241} & set(considered)
    ledger = considered.session.ledger
    assert ledger.spent_s == pytest.approx(300)
    assert ledger.wait_share == pytest.approx(1000 / 1300)
    assert callback.report.saved_s == pytest.approx(0.0, abs=1.0)


def test_a_report_in_the_middle_of_a_step_takes_no_time_from_it(considered: Looks) -> None:
    class Reads(Ticks):
        def on_train_batch_end(self, *_: Any) -> None:
            shares.append(callback.report.wait_share)

    shares: list[float | None] = []
    callback, reads = hot(**STEP), Reads()
    with reads.in_sessions():
        fit(seeded(Small), [reads, callback], train=loader(8 * 300), max_steps=300)
    assert len(considered) < 250
    assert set(shares[1:]) == {0.0}
    assert considered.session.ledger.spent_s == pytest.approx(300)


def test_batches_in_turns_are_all_met(considered: Looks) -> None:
    callback = declined(dynamic=False, threshold=3)
    train([8] * 300 + [8, 12] * 200, [callback])
    assert len(list(considered.session.watch.tracks)) == 2


def test_validation_in_between_loses_no_step() -> None:
    callback = declined()
    fit(seeded(Small), [callback], train=loader(8 * 500), val=loader(8), max_epochs=2, val_check_interval=90)
    report = callback.report
    assert report.steps == 1000
    assert sum(phase.steps for phase in report.phases) == 1000


def test_an_exception_in_a_nap_leaves_the_books_whole() -> None:
    class Raises(Small):
        def on_before_zero_grad(self, *_: Any) -> None:
            if self.trainer.global_step == 390:
                raise KeyError("mine")

    callback = declined()
    with pytest.raises(KeyError, match="mine"):
        fit(seeded(Raises), [callback], train=loader(8 * 500), max_epochs=1)
    assert 390 <= callback.report.steps <= 391
    assert sum(phase.steps for phase in callback.report.phases) == callback.report.steps


def test_a_run_too_short_for_anything_is_slept_through_at_once(considered: Looks) -> None:
    callback = hot(cost_gate=True, threshold=10)
    train([8] * 60, [callback])
    assert callback.report.phase == "declined"
    assert considered[: SOON + 1] == list(range(SOON + 1))
    assert len(considered) <= SOON + 3  # the heap may take one more
    assert callback.report.steps == 60


def test_an_optimizer_that_may_be_fused_is_tried_before_that(considered: Looks) -> None:
    callback = hot(cost_gate=True, threshold=10, fused_optimizer=True)
    train([8] * 60, [callback])
    assert callback.report.phase == "declined"
    assert len(considered) > 10
    assert callback.report.fused


def test_a_rare_shape_at_the_end_leaves_the_decision_and_the_naps_as_they_are(considered: Looks) -> None:
    callback = hot(cost_gate=True, threshold=5, **STEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weighing, "forecast", lambda self, track: Decision(go=True, reason="go"))
        patch.setattr(Weighing, "too_short", lambda self, plan=None: late(self))

        def late(weighing: Any) -> Decision | None:
            return Decision(go=False, reason="too late") if considered.session.steps > 60 else None

        train([8] * 60 + [5] * 10, [callback])
    assert (callback.report.phase, callback.report.decision) == ("steady", "go")
    assert "too late" in [e["reason"] for e in callback.report.events if e.get("phase") == "declined"]
    small = [step for step in considered if step >= 60]
    assert len(small) >= LOOKS_AFTER_ANOTHER


def test_another_shape_ends_the_sleep_of_a_run_that_seemed_too_short(considered: Looks) -> None:
    callback = hot(cost_gate=True, threshold=5, **STEP)
    with pytest.MonkeyPatch.context() as patch:

        def at_first(weighing: Any, plan: Any = None) -> Decision | None:
            return Decision(go=False, reason="too short") if considered.session.steps < 10 else None

        patch.setattr(Weighing, "too_short", at_first)
        patch.setattr(Weighing, "forecast", lambda self, track: Decision(go=True, reason="go"))
        train([8] * 80 + [5] * 150, [callback])
    seen = considered
    assert len([s for s in seen if s < 80]) <= SOON + 4
    first = next(s for s in seen if s >= 80)
    assert [s for s in seen if s >= first][:20] == list(range(first, first + 20))
    assert callback.report.phase == "steady"
    assert callback.report.regions[0].runs > 50
