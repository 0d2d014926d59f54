"""Copies and pickles of a module whose step is swapped: what they are without the callback."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hotcompile import HotCompile
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, seeded

AT_STEP = 20


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS = [copy.copy, copy.deepcopy, through_pickle, through_file]


class OfTheClass(Net):
    """Has the step of its class."""

    def __init__(self) -> None:
        super().__init__(width=8, n_block=1)


class OfTheInstance(OfTheClass):
    """Chooses its step when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step = self.step_a

    def step_a(self, batch: Any, batch_idx: int) -> Any:
        return 0.5 * self.loss(batch)


class Partial(OfTheClass):
    """Has a step that is no method."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step = functools.partial(self.step_a, 0.5)

    def step_a(self, scale: float, batch: Any, batch_idx: int) -> Any:
        return scale * self.loss(batch)


class WithState(OfTheInstance):
    """Says by itself what belongs to its state."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "note": "mine"}


class WithDeepcopy(OfTheClass):
    """Copies itself, attribute by attribute."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            vars(clone)[name] = copy.deepcopy(value, memo)
        return clone


KINDS = [OfTheClass, OfTheInstance, Partial, WithState]


class Copies(pl.Callback):
    """Copies the module after a step that ran compiled."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        self.how, self.made = how, None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == AT_STEP:
            pl_module.trainer = None
            self.made = self.how(pl_module)
            pl_module.trainer = trainer


def copied(kind: type[Net], how: Callable[[Any], Any], callbacks: list[Any]) -> Any:
    copies = Copies(how)
    model = seeded(kind)
    fit(model, [*callbacks, copies], max_epochs=3)
    assert not [name for name in vars(model) if "hotcompile" in name or name == "__getstate__"]
    return copies.made


def step_hot() -> HotCompile:
    return hot(scope="step", compile_optimizer=False)


def assert_same_kind(plain: Any, ours: Any) -> None:
    """The same attributes and step, with weights of its own."""
    assert set(vars(ours)) == set(vars(plain))
    assert vars(ours).get("note") == vars(plain).get("note")
    steps = plain.training_step, ours.training_step
    assert type(steps[0]) is type(steps[1])
    assert getattr(steps[0], "__func__", None) is getattr(steps[1], "__func__", None)
    assert (getattr(steps[0], "__self__", None) is plain) is (getattr(steps[1], "__self__", None) is ours)
    batch = next(iter(loader()))
    for model in (plain, ours):
        with torch.no_grad():
            model.head.weight.add_(torch.arange(3.0)[:, None])
    torch.testing.assert_close(steps[0](batch, 0), steps[1](batch, 0))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_mid_run_is_what_it_is_without_us(kind: type[Net], how: Callable[[Any], Any]) -> None:
    callback = step_hot()
    plain, ours = copied(kind, how, []), copied(kind, how, [callback])
    assert callback.report.phase == "steady"
    assert_same(plain, ours)
    assert_same_kind(plain, ours)


def test_a_copy_that_the_module_makes_by_itself_runs_on_its_own_weights() -> None:
    plain, ours = (copied(WithDeepcopy, copy.deepcopy, callbacks) for callbacks in ([], [step_hot()]))
    batch = next(iter(loader()))
    for model in (plain, ours):
        with torch.no_grad():
            model.head.weight.add_(torch.arange(3.0)[:, None])
    torch.testing.assert_close(plain.training_step(batch, 0), ours.training_step(batch, 0))
    assert_same_kind(through_pickle(plain), through_pickle(ours))


FIRST_COMPILED = 3
KEPT: list[Any] = []
HOW: list[Callable[[Any], Any]] = []


class CopiesItself(OfTheClass):
    """Copies itself in its step, in the middle of what it logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("before", loss)
        KEPT.append(HOW[0](self))
        self.log_dict({"after": 2 * loss})
        return loss


class LogsItsWay(CopiesItself):
    """Has a ``log`` of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.log = self.log_mine

    def log_mine(self, name: str, value: Any, **kwargs: Any) -> None:
        super().log(f"mine/{name}", value, **kwargs)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((CopiesItself, how) for how in WAYS),
        *((LogsItsWay, how) for how in WAYS if how is not copy.copy),  # its log is bound to the original
    ],
)
def test_a_copy_in_a_step_is_what_it_is_without_us(kind: type[Net], how: Callable[[Any], Any]) -> None:
    runs = []
    HOW[:] = [how]
    for callbacks in ([], [step_hot()]):
        KEPT.clear()
        fit(seeded(kind), callbacks, max_epochs=2)
        runs.append(KEPT[:])
    assert callbacks[0].report.regions[0].runs > 0, callbacks[0].report.to_text()
    for plain, ours in zip(*runs, strict=True):
        assert set(vars(plain)) == set(vars(ours))
    for plain, ours in list(zip(*runs, strict=True))[FIRST_COMPILED : FIRST_COMPILED + 3]:
        logged = [dict(fit(model, max_epochs=1).callback_metrics) for model in (plain, ours)]
        assert_same(plain, ours)
        torch.testing.assert_close(*logged, rtol=1e-4, atol=1e-4)
