"""Scalars and texts in real loggers, and the phase in real progress bars."""

from __future__ import annotations

import copy
import csv
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import rich
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.receipt.metrics import (
    PHASE_NUMBER,
    LoggerMetrics,
    PhaseInProgressBar,
    lightning_step,
)

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
PAGE = "## receipt\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"


class LoggingModel(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("own_loss", outputs["loss"])
        return outputs


class Reporter(pl.Callback):
    """Does what the callback does: scalars during training, the receipt as text at the end."""

    def __init__(self) -> None:
        self.metrics = LoggerMetrics("hotcompile")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.log(trainer, {"step_ms": 1.5, "recompiles": 3, "speedup": None, "saved_s": float("nan")})

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.metrics.log_text(trainer, "receipt", PAGE)


class BrokenLogger(CSVLogger):
    """Fails once anything of the callback's is to be written."""

    def __init__(self, save_dir: Path) -> None:
        super().__init__(save_dir)
        self.calls = 0

    def save(self) -> None:
        if any(name.startswith("hotcompile/") for row in self.experiment.metrics for name in row):
            self.experiment.metrics.clear()
            self.calls += 1
            raise ConnectionError("the server is gone")
        super().save()


class History(TensorBoardLogger):
    """Keeps each number by its name, to make a table of them, as NeuralProphet does."""

    def __init__(self, save_dir: Path) -> None:
        super().__init__(save_dir)
        self.history: dict[str, list[float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name, value in metrics.items():
            self.history.setdefault(name, []).append(value)
        super().log_metrics(metrics, step)


class RecordingLogger(Logger):
    """Keeps what it is given; ``log_text`` is added by the tests that need it."""

    name = "recording"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def fit(loggers: Any, *callbacks: pl.Callback, steps: int = 4, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=loggers,
        callbacks=list(callbacks),
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        **options,
    )
    trainer.fit(LoggingModel())
    return trainer


def fake_trainer(*loggers: Any, rank: int = 0, step: int = 7) -> Any:
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=step))
    return SimpleNamespace(is_global_zero=rank == 0, loggers=list(loggers), fit_loop=loop)


def read_tensorboard(logger: TensorBoardLogger) -> EventAccumulator:
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def scalars(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in events.Scalars(name)]


def csv_values(logger: CSVLogger, name: str) -> list[tuple[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return [(row["step"], row[name]) for row in csv.DictReader(file) if row.get(name)]


pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:.*does not have any.*",
    "ignore:Experiment logs directory",
)


class TestRealLoggers:
    def test_the_same_numbers_in_tensorboard_and_csv_at_lightnings_own_steps(self, tmp_path: Path) -> None:
        tensorboard, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")
        fit([tensorboard, table], Reporter())

        events = read_tensorboard(tensorboard)
        own_steps = [step for step, _ in scalars(events, "own_loss")]
        assert own_steps == [0, 1, 2, 3]
        assert scalars(events, "hotcompile/step_ms") == [(step, 1.5) for step in own_steps]
        assert scalars(events, "hotcompile/recompiles") == [(step, 3.0) for step in own_steps]
        assert csv_values(table, "hotcompile/step_ms") == [(str(step), "1.5") for step in own_steps]
        assert [step for step, _ in csv_values(table, "own_loss")] == [str(step) for step in own_steps]

    def test_what_was_not_measured_is_not_there(self, tmp_path: Path) -> None:
        tensorboard = TensorBoardLogger(tmp_path)
        fit(tensorboard, Reporter(), steps=1)
        tags = read_tensorboard(tensorboard).Tags()["scalars"]
        assert {t for t in tags if t.startswith("hotcompile/")} == {
            "hotcompile/step_ms",
            "hotcompile/recompiles",
        }

    def test_steps_with_gradient_accumulation_are_lightnings_own(self, tmp_path: Path) -> None:
        tensorboard = TensorBoardLogger(tmp_path)
        fit(tensorboard, Reporter(), steps=3, accumulate_grad_batches=2)
        events = read_tensorboard(tensorboard)
        own_steps = {step for step, _ in scalars(events, "own_loss")}
        assert {step for step, _ in scalars(events, "hotcompile/step_ms")} == own_steps == {0, 1, 2}

    def test_the_receipt_as_text_in_tensorboard(self, tmp_path: Path) -> None:
        tensorboard, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")
        with warnings.catch_warnings():
            warnings.simplefilter("error", HotCompileWarning)
            fit([table, tensorboard], Reporter(), steps=2)
        (event,) = read_tensorboard(tensorboard).Tensors("hotcompile/receipt/text_summary")
        assert event.tensor_proto.string_val[0].decode() == PAGE
        assert event.step == 2

    def test_a_logger_that_raises_warns_once_and_stops_nothing(self, tmp_path: Path) -> None:
        broken, table = BrokenLogger(tmp_path / "broken"), CSVLogger(tmp_path / "csv")
        with pytest.warns(HotCompileWarning, match="ConnectionError: the server is gone") as caught:
            trainer = fit([broken, table], Reporter())
        mine = [w for w in caught if w.category is HotCompileWarning]
        assert len(mine) == 1
        assert "BrokenLogger (logger 0)" in str(mine[0].message)
        assert trainer.global_step == 4
        assert broken.calls == 4  # it gets another chance each time
        assert len(csv_values(table, "hotcompile/step_ms")) == 4

    def test_no_logger_at_all(self) -> None:
        assert fit(False, Reporter()).global_step == 4


class TestLoggerMetrics:
    def test_only_rank_zero_logs(self) -> None:
        logger = RecordingLogger()
        for rank in (1, 0):
            LoggerMetrics("hot").log(fake_trainer(logger, rank=rank), {"phase": 4})
        assert logger.calls == [({"hot/phase": 4}, 7)]

    def test_nothing_measured_is_no_call(self) -> None:
        logger = RecordingLogger()
        LoggerMetrics("hot").log(fake_trainer(logger), {"a": None, "b": float("inf")})
        assert logger.calls == []

    def test_loggers_cannot_change_each_others_metrics(self) -> None:
        class Greedy(RecordingLogger):
            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                metrics.clear()

        logger = RecordingLogger()
        LoggerMetrics("hot/").log(fake_trainer(Greedy(), logger), {"phase": 4})
        assert logger.calls == [({"hot/phase": 4}, 7)]

    def test_what_a_subclass_does_with_numbers_is_for_its_own(self, tmp_path: Path) -> None:
        logger = History(tmp_path)
        fit(logger, Reporter())
        assert "own_loss" in logger.history
        assert not [name for name in logger.history if name.startswith("hotcompile")]
        written = read_tensorboard(logger).Tags()["scalars"]
        assert {"own_loss", "hotcompile/step_ms"} <= set(written)

    def test_without_a_prefix_nothing_is_written(self) -> None:
        logger, metrics = RecordingLogger(), LoggerMetrics(None)
        trainer = fake_trainer(logger)
        metrics.log(trainer, {"phase": 4})
        metrics.log_text(trainer, "receipt", PAGE)
        assert not metrics.has_readers(trainer)
        assert logger.calls == []

    @pytest.mark.parametrize(("fast_dev_run", "has_readers"), [(True, False), (False, True)])
    def test_the_logger_of_a_fast_dev_run_reads_nothing(
        self, tmp_path: Path, fast_dev_run: bool, has_readers: bool
    ) -> None:
        logger = RecordingLogger()
        trainer = pl.Trainer(logger=logger, fast_dev_run=fast_dev_run, default_root_dir=tmp_path)
        assert len(trainer.loggers) == 1
        assert LoggerMetrics("hotcompile").has_readers(trainer) is has_readers

    def test_each_broken_logger_warns_for_itself(self, tmp_path: Path) -> None:
        metrics = LoggerMetrics("hotcompile")
        trainer = fake_trainer(BrokenLogger(tmp_path / "a"), BrokenLogger(tmp_path / "b"))
        with pytest.warns(HotCompileWarning) as caught:
            metrics.log(trainer, {"phase": 4})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics.log(trainer, {"phase": 4})
        assert ["logger 0" in str(w.message) for w in caught] == [True, False]

    def test_stopping_training_by_hand_is_not_swallowed(self) -> None:
        class Interrupted(RecordingLogger):
            def log_metrics(self, *_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            LoggerMetrics("hot").log(fake_trainer(Interrupted()), {"phase": 4})

    def test_text_goes_to_a_plain_log_text(self) -> None:
        class Texts(RecordingLogger):
            def log_text(self, key: str, text: str) -> None:
                self.calls.append((key, text))

        logger = Texts()
        LoggerMetrics("hot").log_text(fake_trainer(RecordingLogger(), logger), "receipt", PAGE)
        assert logger.calls == [("hot/receipt", PAGE)]

    def test_text_goes_as_a_table_to_a_log_text_of_tables(self) -> None:
        class Tables(RecordingLogger):
            def log_text(
                self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
            ) -> None:
                self.calls.append((key, columns, data, step))

        logger = Tables()
        LoggerMetrics("hot").log_text(fake_trainer(logger), "receipt", PAGE)
        assert logger.calls == [("hot/receipt", ["text"], [[PAGE]], 7)]

    def test_lightnings_wandb_logger_still_takes_tables(self) -> None:
        import inspect

        from lightning.pytorch.loggers import WandbLogger

        assert {"columns", "data", "step"} <= inspect.signature(WandbLogger.log_text).parameters.keys()

    def test_a_picture_is_drawn_once_and_only_if_a_logger_takes_one(self) -> None:
        class Pictures(RecordingLogger):
            def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
                self.calls.append((key, images, step))

        drawn: list[int] = []

        def draw() -> Any:
            drawn.append(1)
            return PICTURE

        plain, one, two = RecordingLogger(), Pictures(), Pictures()
        LoggerMetrics("hot").log_image(fake_trainer(plain), "timeline", draw)
        LoggerMetrics("hot").log_image(fake_trainer(one, rank=1), "timeline", draw)
        assert (drawn, plain.calls, one.calls) == ([], [], [])
        LoggerMetrics("hot").log_image(fake_trainer(plain, one, two), "timeline", draw)
        assert len(drawn) == 1
        for logger in (one, two):
            ((key, images, step),) = logger.calls
            assert (key, step) == ("hot/timeline", 7)
            assert [i is PICTURE for i in images] == [True]

    def test_no_picture_is_no_call(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path)
        LoggerMetrics("hot").log_image(fake_trainer(logger), "timeline", lambda: None)
        logger.finalize("success")
        assert read_tensorboard(logger).Tags()["images"] == []

    def test_a_picture_that_cannot_be_drawn_is_a_warning(self, tmp_path: Path) -> None:
        def draw() -> Any:
            raise ValueError("no font")

        metrics, trainer = LoggerMetrics("hot"), fake_trainer(TensorBoardLogger(tmp_path))
        with pytest.warns(HotCompileWarning, match=r"TensorBoardLogger.*'hot'.*no font"):
            metrics.log_image(trainer, "timeline", draw)

    def test_tensorboard_keeps_the_picture_as_it_is(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path)
        LoggerMetrics("hot").log_image(fake_trainer(logger), "timeline", lambda: PICTURE)
        logger.finalize("success")
        (event,) = read_tensorboard(logger).Images("hot/timeline")
        assert event.step == 7
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(event.encoded_image_string))), PICTURE)

    def test_lightnings_wandb_logger_still_takes_images(self) -> None:
        import inspect

        from lightning.pytorch.loggers import WandbLogger

        assert {"images", "step"} <= inspect.signature(WandbLogger.log_image).parameters.keys()

    def test_copies(self) -> None:
        for metrics in (
            pickle.loads(pickle.dumps(LoggerMetrics("hot"))),
            copy.deepcopy(LoggerMetrics("hot")),
        ):
            assert metrics.prefix == "hot"


def test_phase_numbers_tell_phases_apart_and_grow_with_progress() -> None:
    assert len(set(PHASE_NUMBER.values())) == len(PHASE_NUMBER)
    forward = [PHASE_NUMBER[name] for name in ("observing", "flipping", "settling", "steady")]
    assert forward == sorted(forward)
    assert PHASE_NUMBER["observing"] == 0
    assert max(PHASE_NUMBER["declined"], PHASE_NUMBER["reverted"]) < 0


def test_lightning_step_is_there_before_any_training() -> None:
    assert lightning_step(pl.Trainer(logger=False, enable_checkpointing=False)) == 0


class ShowPhase(pl.Callback):
    """Puts the phase into the bar for the time of the fit and records what the bar is given."""

    def __init__(self) -> None:
        self.phase = "observing"
        self.shown = PhaseInProgressBar()
        self.seen: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shown.put(trainer, lambda: self.phase)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.phase = "observing" if batch_idx < 2 else "steady"

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.progress_bar_callback is not None:
            items = trainer.progress_bar_callback.get_metrics(trainer, pl_module)
            self.seen.append(items.get("hotcompile"))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shown.take_out()


@pytest.fixture
def rich_output() -> Iterator[tuple[RichProgressBar, io.StringIO]]:
    out = io.StringIO()
    # Lightning's bar reconfigures rich's global console, which has to be given back.
    console = rich.get_console()
    before = dict(console.__dict__)
    yield RichProgressBar(console_kwargs={"file": out, "width": 200, "force_terminal": True}), out
    console.__dict__.clear()
    console.__dict__.update(before)


class TestRealProgressBars:
    def test_tqdm(self, capsys: pytest.CaptureFixture[str]) -> None:
        show = ShowPhase()
        fit(False, TQDMProgressBar(), show)
        captured = capsys.readouterr()
        assert "hotcompile=observing" in captured.out + captured.err
        assert "hotcompile=steady" in captured.out + captured.err
        assert show.seen == ["observing", "observing", "steady", "steady"]

    def test_rich(self, rich_output: tuple[RichProgressBar, io.StringIO]) -> None:
        bar, out = rich_output
        show = ShowPhase()
        fit(False, bar, show)
        assert "hotcompile: steady" in out.getvalue()
        assert show.seen == ["observing", "observing", "steady", "steady"]

    def test_no_progress_bar(self) -> None:
        show = ShowPhase()
        assert fit(False, show).global_step == 4
        assert show.seen == []

    def test_the_bar_is_as_before_afterwards(self) -> None:
        bar = TQDMProgressBar()
        fit(False, bar, ShowPhase())
        assert not {"get_metrics", "_hotcompile_phase"} & set(vars(bar))


class PlainBar(ProgressBar):
    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        return {"v_num": 3}

    def disable(self) -> None: ...


def trainer_with(bar: ProgressBar | None) -> Any:
    return SimpleNamespace(progress_bar_callback=bar)


def items(bar: ProgressBar) -> Any:
    return bar.get_metrics(None, None)  # type: ignore[arg-type]


class TestPhaseInProgressBar:
    def test_put_and_take_out(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        shown.put(trainer_with(bar), lambda: "steady")
        assert items(bar) == {"v_num": 3, "hotcompile": "steady"}
        shown.take_out()
        shown.take_out()
        assert items(bar) == {"v_num": 3}
        assert not {"get_metrics", "_hotcompile_phase"} & set(vars(bar))

    def test_a_bar_that_formats_numbers_shows_it_too(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        shown.put(trainer_with(bar), lambda: "steady")
        assert [f"{value:.1f}" for value in items(bar).values()] == ["3.0", "steady"]
        assert f"{items(bar)['hotcompile']:>8}" == "  steady"

    def test_take_out_before_put_and_without_a_bar(self) -> None:
        shown = PhaseInProgressBar()
        shown.take_out()
        shown.put(trainer_with(None), lambda: "steady")
        shown.take_out()

    def test_put_twice_shows_the_latest_and_leaves_nothing(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        shown.put(trainer_with(bar), lambda: "observing")
        shown.put(trainer_with(bar), lambda: "steady")
        assert items(bar)["hotcompile"] == "steady"
        shown.take_out()
        assert "get_metrics" not in vars(bar)

    def test_a_users_own_replacement_is_kept_and_restored(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        mine: Callable[..., Any] = lambda trainer, module: {"mine": 1}  # noqa: E731
        bar.get_metrics = mine  # type: ignore[method-assign]
        shown.put(trainer_with(bar), lambda: "steady")
        assert items(bar) == {"mine": 1, "hotcompile": "steady"}
        shown.take_out()
        assert bar.get_metrics is mine

    def test_one_who_wraps_later_keeps_his_wrapper_through_further_fits(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        shown.put(trainer_with(bar), lambda: "steady")
        ours = bar.get_metrics
        bar.get_metrics = lambda *a: {**ours(*a), "theirs": 1}  # type: ignore[method-assign]
        shown.take_out()
        assert items(bar) == {"v_num": 3, "theirs": 1}
        shown.put(trainer_with(bar), lambda: "observing")
        assert items(bar) == {"v_num": 3, "hotcompile": "observing", "theirs": 1}

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda bar: pickle.loads(pickle.dumps(bar))])
    @pytest.mark.parametrize("kind", [PlainBar, TQDMProgressBar, RichProgressBar])
    def test_a_copied_bar_shows_no_phase_and_can_be_given_one(
        self, copied: Any, kind: type[ProgressBar]
    ) -> None:
        trainer = SimpleNamespace(loggers=[], progress_bar_metrics={"loss": 0.5})
        bar = kind()
        PhaseInProgressBar().put(trainer_with(bar), lambda: "steady")
        other = copied(bar)
        own = kind().get_metrics(trainer, None)  # type: ignore[arg-type]
        assert other.get_metrics(trainer, None) == own
        assert bar.get_metrics(trainer, None)["hotcompile"] == "steady"  # type: ignore[arg-type]
        PhaseInProgressBar().put(trainer_with(other), lambda: "settling")
        assert other.get_metrics(trainer, None) == {**own, "hotcompile": "settling"}
        assert bar.get_metrics(trainer, None)["hotcompile"] == "steady"  # type: ignore[arg-type]

    def test_a_copy_of_the_owner_does_not_carry_the_bar_along(self) -> None:
        bar, shown = PlainBar(), PhaseInProgressBar()
        shown.put(trainer_with(bar), lambda: "steady")
        for other in (copy.deepcopy(shown), pickle.loads(pickle.dumps(shown))):
            other.take_out()
        assert items(bar)["hotcompile"] == "steady"
