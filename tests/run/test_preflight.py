"""Errors in planning: what tells of wrong options is raised, anything else is a reason to decline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hotcompile import HotCompile, HotCompileConfig, HotCompileError, callback
from lightning_hotcompile.errors import HotCompileWarning, PlanError, TargetError
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run import preflight
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, make_trainer, seeded


@pytest.fixture(autouse=True)
def _not_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTCOMPILE", raising=False)


class OwnLinear(nn.Linear):
    """Sets what its forward needs, and not what ``extra_repr`` of its base reads."""

    def __init__(self, n: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(n, n) / n)
        self.register_parameter("bias", None)


class WithOwnLinear(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.drop = OwnLinear(16)


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_model_that_cannot_describe_itself_is_compiled(scope: str) -> None:
    plain, model, ours = seeded(WithOwnLinear), seeded(WithOwnLinear), hot(scope=scope)
    fit(plain)
    fit(model, [ours])
    assert ours.report.phase == "steady"
    assert_same(plain, model)


class DrawsWhenDescribed(nn.Linear):
    """Has a weight that is drawn whenever it is read, as a module of Pyro's."""

    def extra_repr(self) -> str:
        return f"mean={torch.randn(3).mean():.1f}"


class Bayesian(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.drop = nn.Sequential(DrawsWhenDescribed(16, 16), nn.Dropout(0.5))


@pytest.mark.parametrize("scope", ["step", "regions", "auto"])
def test_planning_draws_no_random_numbers(scope: str) -> None:
    plain, model = seeded(Bayesian), seeded(Bayesian)
    fit(plain)
    fit(model, [hot(scope=scope, threshold=1000)])
    assert_same(plain, model, tolerance=0)


class WithTestStep(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class Planning:
    """Planning that raises, and what the other ranks were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
        self.told: list[tuple[str, str | None]] = []
        self.error = error
        planning = self

        class Ranks:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def agree_to_watch(self, plan_digest: str, reason: str | None) -> str | None:
                planning.told.append((plan_digest, reason))
                return reason

        def raises(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(callback, where, raises)
        monkeypatch.setattr(preflight, "Ranks", Ranks)

    def train(self, **options: Any) -> tuple[Net, HotCompile]:
        model, ours = seeded(Net), hot(**options)
        fit(model, [ours], max_epochs=1)
        return model, ours


PLACES = ["why_idle", "plan_for"]
ODD = "HotCompile switched itself off after an error of its own: KeyError: 'odd'"


class TestAnErrorOfItsOwn:
    @pytest.mark.parametrize("where", PLACES)
    def test_training_goes_on_and_the_report_says_why(
        self, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        planning, plain = Planning(monkeypatch, where, KeyError("odd")), seeded(Net)
        fit(plain, max_epochs=1)
        with (
            caplog.at_level(logging.DEBUG, "lightning_hotcompile"),
            pytest.warns(HotCompileWarning, match=r"KeyError: 'odd'. Training goes on eagerly.$") as warned,
        ):
            model, ours = planning.train(on_error="eager")
        assert (ours.report.phase, ours.report.reason) == ("declined", ODD)
        assert planning.told == [("none", ODD)]
        assert [w.filename for w in warned if "lightning_hotcompile" in w.filename] == []
        assert any(r.exc_info and r.exc_info[1] is planning.error for r in caplog.records)
        assert_same(plain, model, tolerance=0.0)

    @pytest.mark.parametrize("where", PLACES)
    def test_it_can_be_raised_instead_and_the_other_ranks_do_not_wait(
        self, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planning = Planning(monkeypatch, where, KeyError("odd"))
        with pytest.raises(KeyError) as caught:
            planning.train(on_error="raise")
        assert caught.value is planning.error
        assert planning.told == [("none", "KeyError: 'odd'")]

    def test_another_stage_declines_for_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Planning(monkeypatch, "plan_for", KeyError("odd"))
        ours = hot(on_error="eager", stages=["test"])
        with pytest.warns(HotCompileWarning, match="KeyError: 'odd'"):
            make_trainer([ours]).test(WithTestStep(), loader(), verbose=False)
        assert ours.reports["test"].reason == ODD


@pytest.mark.parametrize("error", [TargetError("no such module"), PlanError("not with this scope")], ids=repr)
def test_wrong_options_are_raised_with_any_on_error(
    error: HotCompileError, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = Planning(monkeypatch, "plan_for", error)
    with pytest.raises(HotCompileError) as caught:
        planning.train(on_error="eager")
    assert caught.value is error
    assert planning.told == [("none", f"{type(error).__name__}: {error}")]


@pytest.mark.parametrize("asked", [True, "auto", False])
@pytest.mark.parametrize("backend", ["cudagraphs", "aot_eager"])
def test_no_optimizer_is_compiled_into_a_cuda_graph(backend: str, asked: bool | str) -> None:
    class Looks(Net):
        def on_train_start(self) -> None:
            plans.append(preflight.plan_for(self.trainer, self, config))

    plans: list[CompilePlan] = []
    config = HotCompileConfig(backend=backend, scope="step", compile_optimizer=asked, fused_optimizer=False)
    fit(seeded(Looks), max_steps=1)
    (plan,) = plans
    graphs = backend == "cudagraphs"
    assert bool(plan.of_kind("optimizer")) is (bool(asked) and not graphs)
    assert (preflight.OPTIMIZERS_OF_CUDA_GRAPHS in plan.notes) is (bool(asked) and graphs)


class Holds(pl.Callback):
    """Has another callback at hand, and passes on some of what Lightning tells it."""

    def __init__(self, held: HotCompile) -> None:
        self.held = held

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.held.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, *args: Any) -> None:
        self.held.on_train_batch_start(*args)


def test_a_callback_that_the_trainer_does_not_have_does_nothing(tmp_path: Path) -> None:
    """Nobody knows which hooks it would be told of."""
    plain, model = seeded(Net), seeded(Net)
    ours = hot(event_log=tmp_path / "events.jsonl")
    fit(plain)
    fit(model, [Holds(ours)])
    assert ours.report.phase == "declined"
    assert ours.report.reason == "it is not in the Trainer's own list of callbacks"
    assert not (tmp_path / "events.jsonl").exists()
    assert_same(plain, model, tolerance=0.0)
