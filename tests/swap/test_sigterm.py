"""A process that is told to end amid a compile does not first finish that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.hot import STEP, assert_same, hot
from tests.models import Small, fit, make_trainer, seeded
from tests.models import loader as batches

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm signal"),
    pytest.mark.usefixtures("own_alarm"),
]

NEVER = 20.0
"""Seconds: a compile that goes on for ever has an end of its own, should the signal not end it."""


class Rings:
    """A backend during which the signal comes."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.begun = self.runs = 0
        self._then = then

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        self.begun += 1
        signal.raise_signal(signal.SIGTERM)
        self._then()
        return self._counted(graph.forward)

    def _counted(self, forward: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return forward(*args)

        return run


def goes_on_for_ever() -> None:
    threading.Event().wait(NEVER)
    pytest.fail("was not interrupted")


def trained_until_it_ended(callbacks: list[pl.Callback]) -> tuple[Small, pl.Trainer]:
    model, trainer = seeded(Small), make_trainer(callbacks)
    with pytest.raises(SIGTERMException):
        trainer.fit(model, batches())
    return model, trainer


def assert_has_made_four_steps(model: Small, trainer: pl.Trainer) -> None:
    plain = seeded(Small)
    fit(plain, max_steps=4, max_epochs=-1)
    assert trainer.global_step == 4
    assert_same(plain, model, tolerance=1e-6)


@pytest.mark.parametrize("scope", ["step", "module"])
@pytest.mark.parametrize("compile_optimizer", [False, True])
def test_the_compile_ends_and_eager_makes_the_step(scope: str, compile_optimizer: bool) -> None:
    backend = Rings(then=goes_on_for_ever)
    callback = hot(
        scope=scope, compile_optimizer=compile_optimizer, backend=backend, on_error="eager", parity="off"
    )
    model, trainer = trained_until_it_ended([callback])
    assert_has_made_four_steps(model, trainer)
    assert backend.begun == 1, "nothing else is compiled in that step"
    assert any("SIGTERM" in (region.note or "") for region in callback.report.regions)


def test_where_errors_are_raised_the_compile_is_finished() -> None:
    """The training ends as Lightning ends it, and not by an error of the compile."""
    backend = Rings(then=lambda: None)
    callback = hot(**{**STEP, "backend": backend, "on_error": "raise"})
    model, trainer = trained_until_it_ended([callback])
    assert_has_made_four_steps(model, trainer)
    assert backend.begun == 1
    assert backend.runs > 0


class RingsBefore(pl.Callback):
    """The signal comes before the step that compiles."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_nothing_is_compiled_in_the_last_step() -> None:
    """As where the signal comes while the compiler is imported, which takes longer than a step."""
    backend = Rings(then=lambda: None)
    callback = hot(**{**STEP, "backend": backend, "on_error": "eager"})
    model, trainer = trained_until_it_ended([RingsBefore(), callback])
    assert_has_made_four_steps(model, trainer)
    assert backend.begun == 0
