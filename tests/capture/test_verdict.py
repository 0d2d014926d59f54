"""The callback that waits for a verdict, in Trainers of this process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_hotcompile import HotCompile, environment
from lightning_hotcompile.capture.callback import Capture
from lightning_hotcompile.capture.ending import TrainingEnded
from lightning_hotcompile.capture.order import VARIABLE, VERDICT_FILE, WORTH_VARIABLE, Order, WorthOrder
from lightning_hotcompile.capture.verdict import AwaitVerdict
from tests.hot import hot
from tests.models import Net, fit, loader, seeded


def waiting(tmp_path: Path, now: Any = None, **order: Any) -> AwaitVerdict:
    given = WorthOrder(folder=str(tmp_path), **{"max_seconds": 600.0, **order})
    clock = {} if now is None else {"now": now}
    return AwaitVerdict(given, HotCompile, lambda trainer: 77, **clock)


def verdict(tmp_path: Path) -> Any:
    return json.loads((tmp_path / VERDICT_FILE).read_text(encoding="utf-8"))


def stopped(tmp_path: Path, callback: AwaitVerdict, *others: Any, **options: Any) -> Any:
    with pytest.raises(TrainingEnded) as ended:
        fit(seeded(Net), [*others, callback], **options)
    assert ended.value.code == 0
    return verdict(tmp_path)


def test_the_training_ends_with_the_verdict_and_saves_nothing(tmp_path: Path) -> None:
    saving = [ModelCheckpoint(tmp_path / "a", save_on_exception=True), OnExceptionCheckpoint(tmp_path / "b")]
    own = hot(scope="step")
    found = stopped(
        tmp_path,
        waiting(tmp_path),
        own,
        *saving,
        train=loader(2000),
        val=loader(8),
        enable_checkpointing=True,
    )
    assert (found["ended"], found["planned_steps"]) == ("", 77)
    assert found["report"]["phase"] == "steady"
    assert found["report"]["speedup"]["n"] >= 10
    assert found["report"]["steps"] < 200
    assert {p.name for p in tmp_path.iterdir()} == {VERDICT_FILE}
    assert own.report.phase == "steady"


def test_a_callback_of_the_script_keeps_its_options_but_asks_no_forecast(tmp_path: Path) -> None:
    own = HotCompile(threshold=4, min_speedup=0.0, scope="regions", prewarm=True)
    stopped(tmp_path, waiting(tmp_path, max_steps=1), own)
    assert (own.config.threshold, own.config.scope) == (4, "regions")
    assert (own.config.cost_gate, own.config.prewarm) == (False, False)


def test_what_the_script_has_learned_in_earlier_runs_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "new"))
    own = hot(store=str(tmp_path / "old"))
    stopped(tmp_path, waiting(tmp_path, max_steps=1), own)
    assert {p.name for p in tmp_path.iterdir()} == {VERDICT_FILE, "new"}


def test_scope_and_backend_can_be_given(tmp_path: Path) -> None:
    own = HotCompile(scope="pattern", targets=["head"])
    stopped(tmp_path, waiting(tmp_path, max_steps=1, scope="regions", backend="eager"), own)
    assert (own.config.scope, own.config.targets, own.config.backend) == ("regions", (), "eager")


def test_the_limit_of_steps(tmp_path: Path) -> None:
    found = stopped(tmp_path, waiting(tmp_path, max_steps=2), hot(threshold=50))
    assert found["ended"] == "the limit of 2 steps (--max-steps) was reached"
    assert found["report"]["phase"] == "observing"


def test_the_limit_of_time(tmp_path: Path) -> None:
    seconds = itertools.count(0, 30)
    found = stopped(tmp_path, waiting(tmp_path, lambda: next(seconds), max_seconds=90.0), hot(threshold=50))
    assert found["ended"] == "the limit of 1.5 minutes (--max-minutes) was reached"


def test_a_short_training_ends_by_itself_and_the_next_one_counts(tmp_path: Path) -> None:
    callback, own = waiting(tmp_path), hot(scope="step")
    fit(seeded(Net), [own, callback], train=loader(16), max_epochs=1)
    assert verdict(tmp_path)["ended"] == "the training ended after 2 steps"
    assert stopped(tmp_path, callback, own, train=loader(2000))["ended"] == ""


def test_a_model_that_cannot_be_compiled_is_declined_at_once(tmp_path: Path) -> None:
    found = stopped(tmp_path, waiting(tmp_path), hot(scope="module", keep_eager=["*"]))
    assert found["report"]["phase"] == "declined"
    assert "nothing to compile" in found["report"]["reason"]


def test_without_hotcompile_nothing_happens(tmp_path: Path) -> None:
    fit(seeded(Net), [waiting(tmp_path)], max_epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_its_record_says_who_ended_the_training(tmp_path: Path) -> None:
    fit(seeded(Net), [hot(), waiting(tmp_path)], train=loader(16), max_epochs=1)
    assert verdict(tmp_path)["stopped"] is False
    assert stopped(tmp_path, waiting(tmp_path, max_steps=1), hot())["stopped"] is True


class TwoRanks:
    """A Trainer, as far as the callback looks at it, of which the other rank would end at some step."""

    def __init__(self, ends_at: int | None) -> None:
        self.ends_at = ends_at
        self.callbacks: list[Any] = [hot(threshold=50)]
        self.world_size, self.is_global_zero, self.strategy = 2, True, self
        self.step = 0
        self.asked: list[int] = []

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        self.asked.append(self.step)
        return decision or (self.ends_at is not None and self.step >= self.ends_at)

    def train(self, callback: AwaitVerdict, steps: int) -> None:
        trainer: Any = self
        callback.on_train_start(trainer, None)  # type: ignore[arg-type]
        for self.step in range(1, steps + 1):
            callback.on_train_batch_end(trainer, None, None, None, self.step)  # type: ignore[arg-type]


def test_ranks_end_together_and_ask_each_other_at_few_steps(tmp_path: Path) -> None:
    trainer = TwoRanks(ends_at=13)
    with pytest.raises(TrainingEnded):
        trainer.train(waiting(tmp_path), 50)
    assert trainer.asked == [10, 20]
    assert verdict(tmp_path)["ended"] == "another rank has ended the training"


def test_ranks_end_at_the_limit_of_steps(tmp_path: Path) -> None:
    trainer = TwoRanks(ends_at=None)
    with pytest.raises(TrainingEnded):
        trainer.train(waiting(tmp_path, max_steps=7), 50)
    assert trainer.asked == [7]
    assert verdict(tmp_path)["ended"] == "the limit of 7 steps (--max-steps) was reached"


@pytest.mark.parametrize(
    ("phase", "ended"), [("declined", ""), ("settling", "the training ended after 8 steps")]
)
def test_a_verdict_after_which_ranks_did_not_ask_is_one(tmp_path: Path, phase: str, ended: str) -> None:
    trainer, callback = TwoRanks(ends_at=None), waiting(tmp_path)
    with patch.object(HotCompile, "phase", phase):
        trainer.train(callback, 8)
        callback.on_train_end(trainer, None)  # type: ignore[arg-type]
    assert trainer.asked == []
    assert verdict(tmp_path)["ended"] == ended


def test_it_comes_behind_the_callback_of_the_environment_and_sets_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing of it is timed as part of a step."""
    order = WorthOrder(folder=str(tmp_path), max_seconds=600.0, max_steps=1, scope="regions", backend="eager")
    monkeypatch.setenv(WORTH_VARIABLE, order.to_text())
    monkeypatch.setenv(VARIABLE, Order(folder=str(tmp_path), steps=1).to_text())
    monkeypatch.setenv("HOTCOMPILE", "force")
    found = environment.callbacks_from_environment()
    assert [type(c) for c in found] == [Capture, HotCompile, AwaitVerdict]
    with pytest.raises(TrainingEnded):
        fit(seeded(Net))
    assert verdict(tmp_path)["report"]["scope"] == "regions"
