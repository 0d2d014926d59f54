"""Errors of the user's code at any step: they come out as they are, and everything is given back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.hot import hot
from tests.matrix.compare import assert_close, attributes_of, hooks_of, seed
from tests.matrix.nets import SgdNet
from tests.models import loader, make_trainer, seeded

# Steps, with threshold 2: capture, the compiling one, settling (eager and compiled), steady.
PLACES = {"first": 0, "capture": 2, "flip": 3, "settling eager": 6, "settling compiled": 7, "steady": 30}


class Fails(SgdNet):
    """Raises at one step, before or after its loss was made; then goes on as if nothing had been."""

    def __init__(self, at: int = -1, where: str = "step") -> None:
        super().__init__()
        self.at, self.where, self.seen = at, where, 0

    def fail(self, where: str) -> None:
        if where == self.where and self.seen == self.at:
            self.at = -1
            raise ValueError("mine")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fail("batch start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.where == "step" and self.seen == self.at:
            self.at = -1
            raise ValueError("mine")
        return loss

    def on_after_backward(self) -> None:
        self.fail("after backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("batch end")
        self.seen += 1


def run(model: Any, callbacks: list[Any], raises: Any = None) -> Any:
    seed()
    trainer = make_trainer(callbacks, max_epochs=3)
    if raises is None:
        trainer.fit(model, loader())
    else:
        with pytest.raises(raises):
            trainer.fit(model, loader())
    return trainer


WHERE = ("batch start", "step", "after backward", "batch end")

FAULTS = [
    *[(place, where, "regions") for place in PLACES for where in WHERE],
    *[(place, where, "auto") for place in ("flip", "settling compiled") for where in WHERE[1:3]],
]


@pytest.mark.parametrize(("place", "where", "scope"), FAULTS)
def test_an_error_of_the_user(place: str, where: str, scope: str) -> None:
    plain, model = seeded(Fails, PLACES[place], where), seeded(Fails, PLACES[place], where)
    callback = hot(scope=scope, threshold=2)
    before = run(plain, [], ValueError)
    trainer = run(model, [callback], ValueError)
    assert trainer.global_step == before.global_step
    assert attributes_of(plain) == attributes_of(model)
    assert hooks_of(plain) == hooks_of(model)
    assert_close(plain.state_dict(), model.state_dict(), "after the error")
    assert callback.report.phase in ("observing", "flipping", "settling", "steady")


@pytest.mark.parametrize("scope", ["auto", "regions"])
@pytest.mark.parametrize("place", ["flip", "settling compiled"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_following_fit_works(error: Any, place: str, scope: str) -> None:
    class Raises(pl.Callback):
        def __init__(self) -> None:
            self.at = PLACES[place]

        def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == self.at:
                self.at = -1
                raise error("mine")

    plain, model, callback = seeded(SgdNet), seeded(SgdNet), hot(scope=scope, threshold=2)
    expected = SystemExit if error is KeyboardInterrupt else error
    for net, callbacks in ((plain, []), (model, [callback])):
        run(net, [*callbacks, Raises()], expected)
        run(net, callbacks)
    assert callback.report.phase == "steady", callback.report.to_text()
    assert_close(plain.state_dict(), model.state_dict(), "after the second fit")
    assert attributes_of(plain) == attributes_of(model)


def test_random_state_after_an_error_in_the_flip_is_that_of_a_run_without() -> None:
    states = []
    for callbacks in ([], [hot(scope="regions", threshold=2)]):
        run(seeded(Fails, PLACES["flip"], "after backward"), callbacks, ValueError)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
