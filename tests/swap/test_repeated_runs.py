"""Compiled code that fails under an activation checkpoint: the training goes on as it does without."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_hotcompile.errors import HotCompileWarning, ParityError
from lightning_hotcompile.swap import repeats
from tests.hot import assert_same, hot
from tests.models import Net, loader, make_trainer, seeded
from tests.swap.test_checkpoints import keeps_products

NAN = float("nan")


def raises(code: Any, args: Any) -> Any:
    raise RuntimeError("no kernel today")


def saves_then_raises(code: Any, args: Any) -> Any:
    code(*args)
    raise RuntimeError("no kernel today")


def makes_nan(code: Any, args: Any) -> Any:
    return tuple(t * NAN for t in code(*args))


FAULTS = [raises, saves_then_raises, makes_nan]


class Faulty:
    """``aot_eager``, whose code fails in one run of all, or in that one and all after it."""

    def __init__(self, fault: Any, run: int, *, for_good: bool = False) -> None:
        self.fault, self.run, self.for_good = fault, run, for_good
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        code = lookup_backend("aot_eager")(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            fails = self.runs >= self.run if self.for_good else self.runs == self.run
            return self.fault(code, args) if fails else code(*args)

        return run


USUAL: dict[str, Any] = {"use_reentrant": False}
TO_ITS_END: dict[str, Any] = {**USUAL, "early_stop": False}
SELECTIVE: dict[str, Any] = {
    **USUAL,
    "context_fn": functools.partial(create_selective_checkpoint_contexts, keeps_products),
}


class Each(Net):
    """Three blocks, a checkpoint for each."""

    settings = USUAL

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        y: Tensor = self.head(x)
        return y


class EachToItsEnd(Each):
    settings = TO_ITS_END


class Selective(Each):
    settings = SELECTIVE


class OneForAll(Each):
    def row(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(checkpoint(self.row, self.inp(x), **self.settings))
        return y


class SelectiveForAll(OneForAll):
    settings = SELECTIVE


def trained(kind: type[Each], callbacks: list[Any]) -> Each:
    model = seeded(kind)
    torch.manual_seed(5)
    make_trainer(callbacks, max_epochs=1).fit(model, loader())
    return model


@functools.cache
def plain(kind: type[Each]) -> Each:
    return trained(kind, [])


def with_faulty(backend: Faulty, **options: Any) -> Any:
    settings = {"scope": "regions", "on_error": "eager", "compile_optimizer": False, **options}
    return hot(backend=backend, **settings)


RUNS = range(4, 11)
"""Before them code is compared; a step has three in its forward, and three that repeat them."""


@pytest.mark.parametrize("kind", [Each, EachToItsEnd, OneForAll])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_goes_on_in_whatever_run_code_has_failed(fault: Any, kind: type[Each]) -> None:
    given_up = 0
    for run in RUNS:
        backend = Faulty(fault, run)
        callback = with_faulty(backend)
        assert_same(plain(kind), trained(kind, [callback]))
        assert backend.runs >= run
        given_up += callback.report.phase == "reverted"
    assert given_up >= 3


@pytest.mark.parametrize("run", [5, 7])
@pytest.mark.parametrize("scope", ["module", "auto"])
def test_other_scopes(scope: str, run: int) -> None:
    assert_same(plain(Each), trained(Each, [with_faulty(Faulty(raises, run), scope=scope)]))


@pytest.mark.parametrize("scope", ["regions", "module"])
def test_comparisons_leave_the_store_of_a_selective_checkpoint_alone(scope: str) -> None:
    """It is given what is kept in the order in which the forward has made it."""
    callback = hot(backend="aot_eager", scope=scope, compile_optimizer=False, random="eager")
    assert_same(plain(SelectiveForAll), trained(SelectiveForAll, [callback]))
    assert callback.report.phase in ("settling", "steady")
    assert "agree with eager" in callback.report.parity


@pytest.mark.parametrize("run", [8, 9, 10])
def test_in_the_forward_of_a_selective_checkpoint(run: int) -> None:
    assert_same(plain(Selective), trained(Selective, [with_faulty(Faulty(raises, run))]))


def test_a_repeat_of_a_selective_checkpoint_ends_with_the_error_of_the_code() -> None:
    """It takes what was kept out of a store: to repeat it once more would take the next."""
    with pytest.raises(RuntimeError, match="no kernel today"):
        trained(Selective, [with_faulty(Faulty(raises, 6))])


def test_on_several_ranks_nothing_is_repeated_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective among it would be one that the other ranks do not call."""
    monkeypatch.setattr(repeats, "has_other_ranks", lambda: True)
    errors = []
    for run in RUNS:
        try:
            model = trained(Each, [with_faulty(Faulty(raises, run))])
        except RuntimeError as error:
            errors.append(str(error))
        else:
            assert_same(plain(Each), model)
    assert set(errors) == {"no kernel today"}
    assert len(errors) < len(RUNS)


def test_code_that_fails_for_good_ends_the_training_with_its_own_error() -> None:
    callback = with_faulty(Faulty(raises, 7, for_good=True))
    with (
        pytest.warns(HotCompileWarning, match="failed twice where an activation checkpoint repeats it"),
        pytest.raises(RuntimeError, match="no kernel today"),
    ):
        trained(Each, [callback])


def test_nan_for_good_in_what_a_checkpoint_repeats_is_not_trained_on() -> None:
    callback = with_faulty(Faulty(makes_nan, 6, for_good=True))
    with (
        pytest.warns(HotCompileWarning, match="failed twice"),
        pytest.raises(ParityError, match="NaN or Inf"),
    ):
        trained(OneForAll, [callback])


def test_errors_that_are_to_be_raised_are() -> None:
    with pytest.raises(RuntimeError, match="no kernel today"):
        trained(Each, [with_faulty(Faulty(raises, 8), on_error="raise")])
