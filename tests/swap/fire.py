"""Trains one LightningModule with and without the callback, and compares all that can be seen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from torch import Tensor

from lightning_hotcompile import HotCompile
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


class Fire(Net):
    """A small model; a case overrides its step, and says what is expected of the step region.

    ``note`` is for what a step observes or draws; both trainings must have ``seen`` the same.
    """

    most_graphs = 1
    most_recompiles = 0
    captured: bool | None = True
    """Whether compiled code of the step runs; if not, ``why`` is in the report's reason. ``None``: either."""
    why = ""
    raises: type[BaseException] | None = None
    options: ClassVar[dict[str, Any]] = {}
    """Options of the Trainer."""
    callback: ClassVar[dict[str, Any]] = {}
    """Options of HotCompile."""

    def __init__(self) -> None:
        super().__init__(width=16, n_block=1)
        self.seen: list[Any] = []
        self.note: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # A list that grows in the step itself would mean a recompile each time.
        self.seen.append(self.note)


class Experiment(DummyExperiment):
    """Counts the calls that a step makes directly."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.calls.append((name, float(value), step))


class Recorder(Logger):
    """A logger that remembers what reaches it, but for what the callback itself logs."""

    name = version = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, float, int | None]] = []
        self.experiment = Experiment()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged += [(k, v, step) for k, v in metrics.items() if not k.startswith("hotcompile/")]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Watch(Callback):
    """What other callbacks see after each batch: metrics, progress bar, outputs, random states."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.bar: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
        metrics = {k: v.clone() for k, v in trainer.callback_metrics.items()}
        bar = {k: v for k, v in trainer.progress_bar_metrics.items() if k != "hotcompile"}
        draws = (torch.get_rng_state().sum(), random.getstate()[1][-1], np.random.get_state()[2])
        kept = {k: v for k, v in outputs.items() if not isinstance(v, Tensor) or v.grad_fn is None}
        self.batches.append((metrics, bar, kept, batch, draws))


@dataclass(kw_only=True)
class Trace:
    """What one training left behind."""

    model: Fire
    logged: list[Any]
    batches: list[Any]
    calls: list[Any]
    attributes: list[str]
    error: BaseException | None
    printed: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


def train(model_class: type[Fire], callback: HotCompile | None, capsys: Any = None) -> Trace:
    """Train 24 steps with everything recorded; an exception that is expected is kept."""
    random.seed(3)
    np.random.seed(3)
    model, logger, watch = seeded(model_class), Recorder(), Watch()
    callbacks = [watch] if callback is None else [callback, watch]
    options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, **model_class.options}
    error = None
    if model_class.raises is None:
        fit(model, callbacks, **options)
    else:
        with pytest.raises(model_class.raises) as caught:
            fit(model, callbacks, **options)
        error = caught.value
    return Trace(
        model=model,
        logged=logger.logged,
        batches=watch.batches,
        calls=logger.experiment.calls,
        attributes=sorted(vars(model)),
        error=error,
        printed="" if capsys is None else capsys.readouterr().out,
        metrics=dict(model.trainer.callback_metrics) if model._trainer is not None else {},
    )


def assert_same_trace(plain: Trace, ours: Trace) -> None:
    """Same logs in the same order, same metrics, outputs, draws, prints, attributes, error and weights."""
    assert [entry[::2] for entry in ours.logged] == [entry[::2] for entry in plain.logged]
    for name in ("logged", "batches", "calls", "metrics"):
        assert_close(getattr(plain, name), getattr(ours, name), name)
    assert_close(plain.model.seen, ours.model.seen, "seen")
    assert (repr(plain.error), ours.printed) == (repr(ours.error), plain.printed)
    assert ours.attributes == plain.attributes
    assert_same(plain.model, ours.model)


def assert_close(a: Any, b: Any, path: str) -> None:
    """Equal structure; numbers within 1e-4."""
    if isinstance(a, (Tensor, np.ndarray, float)):
        torch.testing.assert_close(
            torch.as_tensor(b), torch.as_tensor(a), rtol=1e-4, atol=1e-4, equal_nan=True,
            msg=lambda m: f"{path}: {m}",
        )  # fmt: skip
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_close(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert (type(a), len(a)) == (type(b), len(b)), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def under_fire(model_class: type[Fire], capsys: Any = None, **options: Any) -> HotCompile:
    """Train twice and compare; the callback of the second training, its step region held to the case."""
    settings = {"scope": "step", "on_error": "eager", "compile_optimizer": False, **model_class.callback}
    callback = hot(**{**settings, **options})
    plain, ours = train(model_class, None, capsys), train(model_class, callback, capsys)
    assert_same_trace(plain, ours)
    report = callback.report
    step = next((r for r in report.regions if r.kind == "step"), None)
    seen = (report.phase, report.reason, step, report.recompiles, report.graph_breaks)
    if model_class.captured:
        assert report.phase in ("settling", "steady"), seen
        assert step is not None, seen
        assert step.proven, seen
        assert step.runs > 0, seen
    elif model_class.captured is False:
        assert report.phase in ("declined", "reverted"), seen
        assert model_class.why in report.reason, seen
    assert step is None or step.graphs <= model_class.most_graphs, seen
    assert report.recompiles <= model_class.most_recompiles, seen
    return callback
