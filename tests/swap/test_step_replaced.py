"""A step method that the user replaces in mid-run, under the step scope."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from lightning_hotcompile import HotCompile
from lightning_hotcompile.plan.planner import plan_compile
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.installation import Installation
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, loader, seeded

REPLACED_IN, EPOCHS, BATCHES = 6, 30, 12


class Counts(Net):
    """Counts the steps that run what the user has put in place of the first step."""

    def __init__(self) -> None:
        super().__init__(width=8, n_block=1)
        self.counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def count(self) -> None:
        self.counted += 1

    def tenth(self, batch: Any, batch_idx: int) -> Any:
        return 0.1 * self.loss(batch)

    def replace(self) -> None:
        """What happens to the step at the start of one epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == REPLACED_IN:
            self.replace()


class AnotherMethod(Counts):
    """A switch of phases."""

    def second(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        return self.tenth(batch, batch_idx)

    def replace(self) -> None:
        self.training_step = self.second


class AFunction(Counts):
    """A function of the instance, around the method of the class."""

    def replace(self) -> None:
        inner = type(self).training_step

        def step(batch: Any, batch_idx: int) -> Any:
            self.count()
            return 0.1 * inner(self, batch, batch_idx)

        self.training_step = step


class Around(Counts):
    """A wrapper around the step that is there."""

    def replace(self) -> None:
        inner = self.training_step

        def wrapper(batch: Any, batch_idx: int) -> Any:
            self.count()
            return 0.1 * inner(batch, batch_idx)

        self.training_step = wrapper


class InItsClass(Counts):
    """Somebody gives the class another step."""

    def replace(self) -> None:
        def step(self: InItsClass, batch: Any, batch_idx: int) -> Any:
            return self.second(batch, batch_idx)

        type(self).training_step = step

    def second(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        return self.tenth(batch, batch_idx)


class Later(InItsClass):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.second(batch, batch_idx)


class AnotherClass(InItsClass):
    """The module becomes one of another class."""

    def replace(self) -> None:
        self.__class__ = Later


class UnderAWrapper(InItsClass):
    """A wrapper keeps what it found; the class gets another one under it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == REPLACED_IN - 1:
            inner = self.training_step

            def wrapper(batch: Any, batch_idx: int) -> Any:
                if self.current_epoch >= REPLACED_IN:
                    self.count()
                return inner(batch, batch_idx)

            self.training_step = wrapper
        super().on_train_epoch_start()


def of_a_batch(self: Counts, batch: Any) -> Any:
    return self.loss(batch)


def of_its_number_too(self: Counts, batch: Any, number: int) -> Any:
    self.count()
    return 0.1 * (1 + number) * self.loss(batch)


def of_what_there_is(self: Counts, batch: Any, *more: Any) -> Any:
    self.count()
    return 0.1 * (1 + len(more)) * self.loss(batch)


class WithOtherParameters(Counts):
    """Somebody gives the class a step that takes more or less."""

    then: Any

    def replace(self) -> None:
        type(self).training_step = type(self).then  # type: ignore[method-assign]


class TakesLess(WithOtherParameters):
    def then(self, batch: Any) -> Any:
        return of_what_there_is(self, batch)


class TakesMore(WithOtherParameters):
    training_step, then = of_a_batch, of_its_number_too  # type: ignore[assignment]


class TakesAny(WithOtherParameters):
    training_step, then = of_a_batch, of_what_there_is  # type: ignore[assignment]


def trained(kind: type[Counts], callback: HotCompile | None) -> Counts:
    model = seeded(type(kind.__name__, (kind,), {}))  # a class that no other training uses
    fit(model, [callback] if callback else [], max_epochs=EPOCHS)
    return model


REPLACING = [AnotherMethod, AFunction, Around, InItsClass, AnotherClass, UnderAWrapper]


@pytest.mark.parametrize("kind", [*REPLACING, TakesLess, TakesMore, TakesAny])
def test_what_takes_the_place_of_the_step_runs_in_each_step_from_then_on(kind: type[Counts]) -> None:
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    plain, model = trained(kind, None), trained(kind, callback)
    assert plain.counted == (EPOCHS - REPLACED_IN) * BATCHES
    assert model.counted == plain.counted, callback.report.to_text()
    assert callback.report.phase == "steady"
    assert_proven(callback.report)
    assert_same(plain, model)
    assert set(vars(plain)) == set(vars(model))


def test_put_again_the_same_step_finds_its_compiled_code_and_another_one_does_not() -> None:
    model = seeded(Counts)
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    batch, factor = next(iter(loader())), 1.0

    def runs_of(lane: Lane) -> int:
        before = installation.witness.watch.total_runs
        installation.put()
        installation.gate.open(lane)
        torch.testing.assert_close(model.training_step(batch, 0), factor * model.loss(batch))
        installation.gate.close()
        installation.take_out()
        return installation.witness.watch.total_runs - before

    assert [runs_of(lane) for lane in (Lane.COMPILE, Lane.REUSE, Lane.REUSE)] == [1, 1, 1]
    model.training_step, factor = model.tenth, 0.1
    assert runs_of(Lane.REUSE) == 0, "it has not been compiled"
    model.training_step = model.tenth  # another object, the same method
    assert [runs_of(lane) for lane in (Lane.COMPILE, Lane.REUSE)] == [1, 1]
    assert "training_step" in vars(model)


def test_what_the_class_gets_is_compiled_in_place_of_what_it_had() -> None:
    """And found again: one that makes a new object at each look is the same as long as it stands there."""

    class Kind(Counts):
        training_step = functools.partialmethod(Counts.tenth)  # type: ignore[assignment]

    model = seeded(Kind)
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    batch = next(iter(loader()))

    def runs_of(lane: Lane, factor: float) -> int:
        before = installation.witness.watch.total_runs
        installation.gate.open(lane)
        torch.testing.assert_close(model.training_step(batch, 0), factor * model.loss(batch))
        installation.gate.close()
        return installation.witness.watch.total_runs - before

    installation.put()
    assert [runs_of(lane, 0.1) for lane in (Lane.COMPILE, Lane.REUSE)] == [1, 1]
    Kind.training_step = Counts.training_step  # type: ignore[method-assign]
    assert runs_of(Lane.EAGER, 1.0) == runs_of(Lane.REUSE, 1.0) == 0, "it has not been compiled"
    assert [runs_of(lane, 1.0) for lane in (Lane.COMPILE, Lane.REUSE)] == [1, 1]
    installation.take_out()
    assert "training_step" not in vars(model)


def fails_later(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend whose code is taken out of the model in the third epoch or so."""
    compiled, runs = aot_eager(graph, inputs), itertools.count(1)

    def run(*args: Any) -> Any:
        if next(runs) > 15:
            raise RuntimeError("the device has gone")
        return compiled(*args)

    return run


class ForAWhile(pl.Callback):
    """Has a step of its own from the second epoch on, and puts back what it found there in a later one.

    Args:
        until: which epoch, ``None`` for the end of the training.
    """

    def __init__(self, until: int | None) -> None:
        self.until = until

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.found = found = pl_module.training_step
            pl_module.training_step = lambda batch, batch_idx: found(batch, batch_idx)  # type: ignore[assignment]
        elif trainer.current_epoch == self.until:
            pl_module.training_step = self.found  # type: ignore[method-assign]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.until is None:
            pl_module.training_step = self.found  # type: ignore[method-assign]


@pytest.mark.parametrize("until", [5, None])
def test_what_a_callback_has_kept_of_ours_and_puts_back_after_the_end_is_the_step_itself(
    until: int | None,
) -> None:
    model = seeded(Counts)
    callback = hot(scope="step", compile_optimizer=False, backend=fails_later, on_error="eager")
    fit(model, [callback, ForAWhile(until)], max_epochs=7)
    assert callback.report.phase == "reverted"
    assert vars(model)["training_step"] == types.MethodType(Counts.training_step, model)


def test_what_is_put_back_between_two_plans_is_the_step_and_finds_its_compiled_code() -> None:
    model, batch = seeded(Counts), next(iter(loader()))
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    installation.put()
    found = model.training_step
    model.training_step = wrapper = lambda batch, batch_idx: found(batch, batch_idx)  # type: ignore[assignment]
    model.training_step = functools.wraps(found)(wrapper)  # type: ignore[method-assign]
    installation.take_out()
    assert vars(model)["training_step"] is wrapper, "it is somebody's, and has only the marks of ours"
    model.training_step = found  # type: ignore[method-assign]
    for lane in (Lane.COMPILE, Lane.REUSE):
        before = installation.witness.watch.total_runs
        installation.put()
        installation.gate.open(lane)
        model.training_step(batch, 0)
        installation.take_out()
        assert installation.witness.watch.total_runs == before + 1
        assert vars(model)["training_step"] == types.MethodType(Counts.training_step, model)


def test_a_copy_keeps_its_own_step_once_ours_is_gone() -> None:
    model, batch = seeded(Counts), next(iter(loader()))
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    installation.put()
    other = seeded(Counts)
    vars(other)["training_step"] = types.MethodType(model.training_step.__func__, other)
    installation.take_out()
    with torch.no_grad():
        model.head.weight.zero_()
    torch.testing.assert_close(other.training_step(batch, 0), other.loss(batch))
    assert vars(other)["training_step"].__self__ is other
