"""What a swapped step looks like to those who ask: Lightning decides by it what arguments a step is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.profiler import record_function

from lightning_hotcompile.plan.planner import plan_compile
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.installation import Installation
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, seeded

Step = Callable[..., Any]


def undecorated(step: Step) -> Step:
    return step


def wrapped(step: Step) -> Step:
    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return wrapper


def twice(step: Step) -> Step:
    return wrapped(wrapped(step))


DECORATORS = [
    undecorated,
    wrapped,
    torch.autocast("cpu", dtype=torch.bfloat16),
    torch.enable_grad(),
    record_function("step"),
]
NAMES = ["undecorated", "wrapped", "autocast", "enable_grad", "record_function"]


def with_batch(decorate: Step) -> type[Net]:
    class Short(Net):
        @decorate
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

    return Short


def with_index(decorate: Step) -> type[Net]:
    class Long(Net):
        @decorate
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + batch_idx)

    return Long


def with_stages(decorate: Step) -> type[Net]:
    class Validated(Net):
        @decorate
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch) * (1 + dataloader_idx))

    return Validated


@pytest.mark.parametrize("kind", [with_batch, with_index])
@pytest.mark.parametrize("decorate", DECORATORS, ids=NAMES)
def test_a_decorated_step_is_given_what_it_is_given_without_us(
    kind: Callable[[Step], type[Net]], decorate: Step
) -> None:
    model_class = kind(decorate)
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False)
    fit(plain, max_epochs=2)
    fit(model, [callback], max_epochs=2)
    assert callback.report.phase in ("settling", "steady"), callback.report.to_text()
    assert_same(plain, model)


@pytest.mark.parametrize("decorate", DECORATORS, ids=NAMES)
def test_a_decorated_step_of_another_stage(decorate: Step) -> None:
    model_class = with_stages(decorate)
    ends = []
    for callbacks in ([], [hot(scope="step", compile_optimizer=False, stages=["train", "validate"])]):
        model = seeded(model_class)
        trainer = fit(model, callbacks, val=[loader(), loader(32)], max_epochs=2)
        ends.append((model, dict(trainer.callback_metrics)))
    assert callbacks[0].reports["validate"].phase in ("settling", "steady")
    assert_same(ends[0][0], ends[1][0])
    logged = {name: value for name, value in ends[1][1].items() if "hotcompile" not in name}
    torch.testing.assert_close(ends[0][1], logged, rtol=1e-4, atol=1e-4)


class Odd(Net):
    def second(self, *batch_and_index: Any) -> Any:
        return self.loss(batch_and_index[0])


def a_function(batch: Any, batch_idx: int) -> Any:
    return batch[0].square().mean()


def partly(self: Any, scale: float, batch: Any, batch_idx: int) -> Any:
    return scale * self.loss(batch)


class Called:
    """An object that is called, and is no method."""

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        return a_function(batch, batch_idx)


class Decorator:
    """A decorator that is a class, and binds what it decorates by itself."""

    def __init__(self, step: Step) -> None:
        functools.update_wrapper(self, step)
        self.step = step

    def __get__(self, instance: Any, owner: Any) -> Any:
        return functools.partial(self.step, instance)


ON_THE_INSTANCE = {
    "method": lambda model: model.second,
    "function": lambda model: a_function,
    "decorated function": lambda model: wrapped(a_function),
    "decorated method": lambda model: wrapped(model.second),
    "partial": lambda model: functools.partial(partly, model, 2.0),
    "object": lambda model: Called(),
    "mock": lambda model: mock.Mock(wraps=a_function),
    "mock with a specification": lambda model: mock.create_autospec(a_function, side_effect=a_function),
}
ON_THE_CLASS = {
    "twice decorated": twice(Odd.second),
    "static": staticmethod(a_function),
    "partial method": functools.partialmethod(partly, 2.0),
    "object": Called(),
    "decorator that is a class": Decorator(Odd.second),
    "mock": mock.Mock(wraps=a_function),
}


def seen(model: Net) -> dict[str, Any]:
    """What can be told of a step without a call."""
    step = model.training_step
    return {
        "signature": inspect.signature(step),
        "has self": getattr(step, "__self__", None) is model,
        "name": getattr(step, "__name__", None),
        "doc": step.__doc__,
        **{
            f"{name}, {least}": told(lambda n=name, m=least: is_param_in_hook_signature(step, n, min_args=m))
            for name in ("batch_idx", "dataloader_iter", "dataloader_idx")
            for least in (None, 2)
        },
        "is overridden": told(lambda: is_overridden("training_step", model)),
    }


def told(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (AttributeError, TypeError) as error:
        return type(error)


def assert_is_as_before(model: Net) -> None:
    """Looks, and what comes of a call on each lane: eager, compiled, and compiled already."""
    before, batch = seen(model), next(iter(loader()))
    expected = model.training_step(batch, 0)
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    for lane in (Lane.EAGER, Lane.COMPILE, Lane.REUSE):
        installation.put()
        assert {k: v for k, v in seen(model).items() if before[k] is not None} == {
            k: v for k, v in before.items() if v is not None
        }
        installation.gate.open(lane)
        torch.testing.assert_close(model.training_step(batch, 0), expected)
        installation.gate.close()
        installation.take_out()
    assert installation.proofs()[0].runs == 2
    assert seen(model) == before


@pytest.mark.parametrize("kind", [with_batch, with_index])
@pytest.mark.parametrize("decorate", [*DECORATORS, twice], ids=[*NAMES, "twice"])
def test_a_method_of_the_class_looks_as_before(kind: Callable[[Step], type[Net]], decorate: Step) -> None:
    model = kind(decorate)()
    before = seen(model)
    installation = Installation(plan_compile(model, scope="step"), model, hot().config, [])
    installation.put()
    assert "training_step" in vars(model)
    assert seen(model) == before
    installation.take_out()
    assert seen(model) == before


@pytest.mark.parametrize("make", ON_THE_INSTANCE.values(), ids=ON_THE_INSTANCE)
def test_a_step_of_the_instance_is_as_before(make: Callable[[Net], Any]) -> None:
    model = Odd()
    model.training_step = make(model)
    assert_is_as_before(model)


@pytest.mark.parametrize("step", ON_THE_CLASS.values(), ids=ON_THE_CLASS)
def test_an_odd_attribute_of_the_class_is_as_before(step: Any) -> None:
    assert_is_as_before(type("OfTheClass", (Odd,), {"training_step": step})())
