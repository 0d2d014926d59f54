"""One flip, several loggers: what they hold is what the report says."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hotcompile import HotCompile, Report
from lightning_hotcompile.receipt.metrics import PHASE_NUMBER
from tests.hot import ALWAYS_LOGGED, STEP, hot
from tests.models import Small, fit, loader, make_trainer, seeded

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOG_EVERY = 5


@dataclass(frozen=True)
class Run:
    """One training with both loggers, and what they wrote."""

    report: Report
    steps: int
    tensorboard: EventAccumulator
    csv_rows: list[dict[str, str]]

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for e in self.tensorboard.Scalars(name)]

    def csv_points(self, name: str) -> list[tuple[int, float]]:
        return [(int(r["step"]), float(r[name])) for r in self.csv_rows if r.get(name)]


def train(
    folder: Path, callback: HotCompile, *, data: Any = None, ckpt: Path | None = None, **options: Any
) -> Run:
    torch._dynamo.reset()
    tensorboard = TensorBoardLogger(folder, name="tb", version="")
    table = CSVLogger(folder, name="csv", version="", flush_logs_every_n_steps=1)
    settings = {"max_epochs": 6, "log_every_n_steps": LOG_EVERY, **options}
    trainer = make_trainer([callback], logger=[tensorboard, table], **settings)
    trainer.fit(seeded(Small), data if data is not None else loader(), ckpt_path=ckpt)
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return Run(callback.report, trainer.fit_loop.epoch_loop._batches_that_stepped, events, rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield train(tmp_path_factory.mktemp("loggers"), hot(threshold=6, **STEP))
    torch._dynamo.reset()


def expected(report: Report) -> dict[str, float | None]:
    """The report's numbers, written out once more by hand."""
    assert report.eager_ms is not None
    assert report.compiled_ms is not None
    assert report.speedup is not None
    return {
        "phase": PHASE_NUMBER[report.phase],
        "eager_ms": report.eager_ms.median,
        "compiled_ms": report.compiled_ms.median,
        "speedup": report.speedup.value,
        "compile_s": report.compile_s,
        "stall_s": report.stall_s,
        "break_even_step": report.break_even_step,
        "saved_s": report.saved_s,
        "total_speedup": report.total_speedup,
        "recompiles": report.recompiles,
        "graph_breaks": report.graph_breaks,
        "parity_error": report.parity_error,
    }


def test_the_run_came_to_rest(run: Run) -> None:
    assert run.report.phase == "steady", run.report.reason
    assert run.report.steps == run.steps == 72


@pytest.mark.parametrize("name", ALWAYS_LOGGED)
def test_the_last_point_is_what_the_report_says(run: Run, name: str) -> None:
    value = expected(run.report)[name]
    assert value is not None
    tag = f"hotcompile/{name}"
    assert run.points(tag)[-1] == (run.steps, pytest.approx(value, rel=1e-6))  # 32 bits in TensorBoard
    assert run.csv_points(tag)[-1] == (run.steps, pytest.approx(value, rel=1e-12))


def test_break_even_is_there_exactly_if_it_is_known(run: Run) -> None:
    tag, value = "hotcompile/break_even_step", run.report.break_even_step
    if value is None:
        # An earlier point may be there, from when the run still looked like it would pay.
        assert (run.steps, pytest.approx(0)) not in run.csv_points(tag)
        return
    assert run.points(tag)[-1] == (run.steps, value)
    assert run.csv_points(tag)[-1] == (run.steps, value)


def test_nothing_that_was_not_measured_is_written(run: Run) -> None:
    known = {*ALWAYS_LOGGED, "step_ms", "break_even_step"}
    written = {t.removeprefix("hotcompile/") for t in run.tensorboard.Tags()["scalars"] if "hotcompile" in t}
    assert written <= known  # no accelerator here, so no peak_memory_mb
    assert {*ALWAYS_LOGGED, "step_ms"} <= written


def test_both_loggers_hold_the_same_points(run: Run) -> None:
    for tag in run.tensorboard.Tags()["scalars"]:
        if tag.startswith("hotcompile/"):
            table = run.csv_points(tag)
            assert [step for step, _ in run.points(tag)] == [step for step, _ in table], tag
            assert [v for _, v in run.points(tag)] == pytest.approx([v for _, v in table], rel=1e-6), tag


def test_the_phases_of_a_flip_can_be_seen_in_order(run: Run) -> None:
    values = [value for _, value in run.points("hotcompile/phase")]
    assert [PHASE_NUMBER[p] for p in ("observing", "flipping", "settling", "steady")] == sorted(set(values))
    assert values == sorted(values)


def test_the_receipt_is_a_text(run: Run) -> None:
    (tag,) = [t for t in run.tensorboard.Tags()["tensors"] if t.startswith("hotcompile/receipt")]
    (event,) = run.tensorboard.Tensors(tag)
    assert event.step == run.steps
    assert event.tensor_proto.string_val[0].decode() == run.report.to_markdown()


def test_nothing_is_logged_on_each_step(run: Run) -> None:
    for tag in ("hotcompile/step_ms", "hotcompile/phase", "hotcompile/speedup"):
        transitions = 0 if tag.endswith("step_ms") else 4
        assert len(run.points(tag)) <= run.steps / LOG_EVERY + 2 + transitions, tag


def test_step_times_are_at_the_steps_of_lightnings_own(run: Run) -> None:
    own = [step for step, _ in run.points("loss")]
    assert own == list(range(LOG_EVERY - 1, run.steps, LOG_EVERY))
    assert [step for step, _ in run.points("hotcompile/step_ms")] == own


def test_steps_never_run_ahead_of_training(run: Run) -> None:
    for tag in run.tensorboard.Tags()["scalars"]:
        steps = [step for step, _ in run.points(tag)]
        assert steps == sorted(steps), tag
        assert all(0 <= step <= run.steps for step in steps), tag


def test_lightnings_own_curve_is_as_without(run: Run, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(seeded(Small), logger=logger, max_epochs=6, log_every_n_steps=LOG_EVERY)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        plain = [(int(r["step"]), float(r["loss"])) for r in csv.DictReader(file) if r["loss"]]
    assert [step for step, _ in plain] == [step for step, _ in run.csv_points("loss")]
    assert [v for _, v in plain] == pytest.approx([v for _, v in run.csv_points("loss")], rel=1e-4)


def test_a_prefix_of_ones_own(tmp_path: Path) -> None:
    callback = hot(log_prefix="speed/hot", threshold=10_000)
    run = train(tmp_path, callback, max_epochs=1)
    ours = {t for t in run.tensorboard.Tags()["scalars"] if "hot" in t}
    assert ours
    assert all(t.startswith("speed/hot/") for t in ours)


def test_no_prefix_leaves_the_loggers_to_the_model(tmp_path: Path) -> None:
    run = train(tmp_path, hot(log_prefix=None, **STEP), max_epochs=2)
    assert run.report.regions[0].proven
    assert not [tag for kind in run.tensorboard.Tags().values() if kind for tag in list(kind) if "hot" in tag]


def test_a_run_that_was_declined_by_the_forecast_tells_no_numbers_of_compiling(tmp_path: Path) -> None:
    callback = hot(cost_gate=True)
    run = train(tmp_path, callback, max_epochs=2)
    assert run.report.phase == "declined"
    written = {t for t in run.tensorboard.Tags()["scalars"] if t.startswith("hotcompile/")}
    assert written == {"hotcompile/phase", "hotcompile/step_ms", "hotcompile/eager_ms"}
    assert run.points("hotcompile/phase")[-1] == (run.steps, PHASE_NUMBER["declined"])


def test_under_accumulation_the_steps_are_those_of_lightning(tmp_path: Path) -> None:
    callback = hot(threshold=2, **STEP)
    run = train(tmp_path, callback, accumulate_grad_batches=3, max_epochs=8, data=loader(48))
    assert (run.steps, callback.report.steps) == (16, 48)
    own = [step for step, _ in run.points("loss")]
    assert own == [4, 9, 14]
    assert [step for step, _ in run.points("hotcompile/step_ms")] == own
    for tag in run.tensorboard.Tags()["scalars"]:
        assert all(step <= run.steps for step, _ in run.points(tag)), tag


def test_a_resumed_run_goes_on_at_lightnings_steps(tmp_path: Path) -> None:
    trainer = fit(seeded(Small), max_epochs=1, limit_train_batches=7)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    callback = hot(threshold=10_000)
    run = train(tmp_path, callback, max_epochs=3, limit_train_batches=7, ckpt=tmp_path / "first.ckpt")
    own = [step for step, _ in run.points("loss")]
    assert own == [9, 14, 19]
    assert [step for step, _ in run.points("hotcompile/step_ms")] == own
