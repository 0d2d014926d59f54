"""Steps at rest go a short way: it must end where something is different, and lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hotcompile.cruise import CRUISE, NAP
from lightning_hotcompile.session import Session
from tests.hot import hot
from tests.models import Net, fit, loader, make_trainer, seeded


class LongWays(list[int]):
    """The steps that went the long way, and their session."""

    session: Session


@pytest.fixture
def considered(monkeypatch: pytest.MonkeyPatch) -> LongWays:
    """What is considered in the trainings of a test."""
    steps = LongWays()
    original = Session._consider_step

    def consider(session: Session, *args: Any) -> None:
        steps.append(session.steps)
        steps.session = session
        original(session, *args)

    monkeypatch.setattr(Session, "_consider_step", consider)
    return steps


class Batches(torch.utils.data.IterableDataset[Any]):
    """Batches of given sizes, in this order."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for n in self.sizes:
            yield torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def train(sizes: list[int], callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    trainer = make_trainer(callbacks, max_epochs=1, max_steps=-1, limit_train_batches=len(sizes), **options)
    trainer.fit(seeded(Net), DataLoader(Batches(sizes), batch_size=None))
    return trainer


def test_most_steps_at_rest_go_the_short_way(considered: LongWays) -> None:
    callback = hot()
    train([8] * 300, [callback])
    assert callback.report.phase == "steady"
    settled = next(e["step"] for e in callback.report.events if e.get("phase") == "steady")
    after = [step for step in considered if step > settled]
    assert 1 <= len(after) <= 2 + (300 - settled) // (CRUISE + 1)


def test_no_step_is_lost_in_the_books(considered: LongWays) -> None:
    callback = hot()
    train([8] * 300, [callback])
    report = callback.report
    assert report.steps == 300
    assert sum(phase.steps for phase in report.phases) == 300
    assert len(considered) < 200


def test_each_step_since_the_comparison_is_counted_as_compiled(considered: LongWays) -> None:
    callback = hot(scope="step", compile_optimizer=False)
    train([8] * 200, [callback])
    (track,) = considered.session.watch.tracks
    settled = next(e["step"] for e in callback.report.events if e.get("phase") == "steady")
    assert track.steps == 200
    assert track.compiled_steps >= 200 - settled
    assert track.misses == 0


def test_a_report_in_mid_cruise_is_up_to_date() -> None:
    seen: list[tuple[int, int]] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            report = callback.report
            seen.append((report.steps, sum(phase.steps for phase in report.phases)))

    callback = hot()
    train([8] * 150, [callback, Reads()])
    assert seen == [(n, n) for n in range(1, 151)]


def test_an_odd_batch_in_mid_cruise_is_a_signature_of_its_own(considered: LongWays) -> None:
    sizes = [8] * 150
    sizes[137] = sizes[141] = 5
    callback = hot(dynamic=False)
    train(sizes, [callback])
    assert callback.report.phase == "steady"
    assert callback.report.recompiles == 0
    assert {track.steps: track.compiled_steps > 0 for track in considered.session.watch.tracks} == {
        148: True,
        2: False,
    }


def test_another_signature_after_a_declined_one_becomes_hot() -> None:
    callback = hot(dynamic=False, max_signatures=4)
    train([8] * 100 + [12] * 60, [callback])
    detected = [e for e in callback.report.events if e["kind"] == "detected"]
    assert len(detected) == 2
    assert detected[1]["step"] <= 100 + callback.config.threshold + 1


def test_an_exception_in_mid_cruise_leaves_the_model_as_it_was() -> None:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, *_: Any) -> None:
            if self.trainer.global_step == 140:
                raise KeyError("mine")

    callback, model = hot(), seeded(Raises)
    with pytest.raises(KeyError, match="mine"):
        fit(model, [callback], train=loader(8 * 200), max_steps=200)
    assert callback.report.phase == "steady"
    assert "training_step" not in vars(model)
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Freezes(Net):
    """The first block is trained for 140 steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[0].requires_grad_(self.trainer.global_step < 140)


def test_a_model_whose_flags_change_in_mid_cruise_is_right() -> None:
    """Compiled code has guards on them: the step runs eagerly, and as a signature of its own from then on."""
    weights = []
    for callbacks in ([], [hot(dynamic=False)]):
        model = seeded(Freezes)
        fit(model, callbacks, train=loader(8 * 200), max_steps=200)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_a_step_that_fits_nothing_ends_the_cruise(considered: LongWays) -> None:
    callback = hot(dynamic=False, scope="step", compile_optimizer=False, max_signatures=1)
    fit(seeded(Freezes), [callback], train=loader(8 * 200), max_steps=200)
    before, after = considered.session.watch.tracks
    assert before.misses <= 1
    assert abs(after.steps - 60) <= 2


def declined(**options: Any) -> Any:
    """A callback that compiles nothing, since it does not pay."""
    return hot(**{"cost_gate": True, "backend": "inductor", "store": None, **options})


def test_steps_that_stay_eager_are_slept_through_and_counted(considered: LongWays) -> None:
    callback = declined()
    train([8] * 700, [callback])
    report = callback.report
    assert report.phase == "declined"
    assert report.steps == 700
    assert sum(phase.steps for phase in report.phases) == 700
    assert sum(track.steps for track in considered.session.watch.tracks) == 700
    assert len([step for step in considered if step > 300]) <= 2 + 400 // (NAP + 1)
    assert 700 - NAP <= report.samples[-1].step <= 700


def test_a_report_in_a_nap_is_up_to_date() -> None:
    seen: list[tuple[int, int]] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            report = callback.report
            seen.append((report.steps, sum(phase.steps for phase in report.phases)))

    callback = declined()
    train([8] * 400, [callback, Reads()])
    assert seen == [(n, n) for n in range(1, 401)]


def test_another_signature_ends_the_naps(considered: LongWays) -> None:
    callback = declined(dynamic=False)
    train([8] * 400 + [12] * 200, [callback])
    detected = [e["step"] for e in callback.report.events if e["kind"] == "detected"]
    assert len(detected) == 2
    assert 400 < detected[1] <= 400 + NAP + callback.config.threshold + 2
    assert callback.report.steps == 600


def test_batches_in_turns_are_all_met(considered: LongWays) -> None:
    callback = declined(dynamic=False, threshold=3)
    train([8] * 300 + [8, 12] * 200, [callback])
    assert len(list(considered.session.watch.tracks)) == 2


def test_validation_in_between_loses_no_step() -> None:
    callback = declined()
    fit(seeded(Net), [callback], train=loader(8 * 500), val=loader(8), max_epochs=2, val_check_interval=90)
    report = callback.report
    assert report.steps == 1000
    assert sum(phase.steps for phase in report.phases) == 1000


def test_an_exception_in_a_nap_leaves_the_books_whole() -> None:
    class Raises(Net):
        def on_before_zero_grad(self, *_: Any) -> None:
            if self.trainer.global_step == 390:
                raise KeyError("mine")

    callback = declined()
    with pytest.raises(KeyError, match="mine"):
        fit(seeded(Raises), [callback], train=loader(8 * 500), max_epochs=1)
    assert 390 <= callback.report.steps <= 391
    assert sum(phase.steps for phase in callback.report.phases) == callback.report.steps
