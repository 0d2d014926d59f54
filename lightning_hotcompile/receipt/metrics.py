"""The callback's numbers in every logger of the Trainer, and its phase in the progress bar."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger

from lightning_hotcompile.errors import warn

PHASE_NUMBER: Mapping[str, int] = types.MappingProxyType(
    {
        "reverted": -2,
        "declined": -1,
        "observing": 0,
        "prewarming": 1,
        "flipping": 2,
        "settling": 3,
        "refining": 4,
        "steady": 5,
    }
)
"""Phases as numbers for the scalar ``phase``: upwards is progress, below 0 training is eager for good.
"""

PROGRESS_BAR_NAME = "hotcompile"

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_TO_FILES = ("loggers.tensorboard", "loggers.csv_logs")


def _keeps(logger: Logger) -> bool:
    """Whether it does anything: with ``fast_dev_run`` there is one that takes all and keeps nothing."""
    return type(logger).__name__ != "DummyLogger"


class LoggerMetrics:
    """Sends scalars, texts and pictures to all loggers of a Trainer, from rank zero.

    A logger that raises gives one :class:`~lightning_hotcompile.errors.HotCompileWarning`; the
    others get theirs, and training goes on.

    Args:
        prefix: goes before each name, with a slash; ``None`` for nothing in any logger.
    """

    def __init__(self, prefix: str | None) -> None:
        self.prefix = None if prefix is None else prefix.strip("/")
        self._warned: set[str] = set()

    def has_readers(self, trainer: pl.Trainer) -> bool:
        """Whether anything would be written: a receipt that nobody reads need not be made."""
        return self.prefix is not None and trainer.is_global_zero and any(map(_keeps, trainer.loggers))

    def log(self, trainer: pl.Trainer, values: Mapping[str, float | None]) -> None:
        """Log each value at the step that Lightning gives its own metrics now.

        Values that are None or not finite are left out. Costs a write in each logger: call it when
        something changed or as rarely as Lightning logs, not on each step.
        """
        metrics = {
            f"{self.prefix}/{name}": value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
        if metrics:
            step = lightning_step(trainer)
            self._for_each_logger(trainer, lambda logger: _write_metrics(logger, metrics, step))

    def log_text(self, trainer: pl.Trainer, title: str, markdown: str) -> None:
        """Send a Markdown text to the loggers that take one: TensorBoard, and those with ``log_text``."""
        name, step = f"{self.prefix}/{title}", lightning_step(trainer)
        self._for_each_logger(trainer, lambda logger: _write_text(logger, name, markdown, step))

    def log_image(self, trainer: pl.Trainer, title: str, draw: Callable[[], Any]) -> None:
        """Send a picture to the loggers that take one: TensorBoard, and those with ``log_image``.

        Args:
            trainer: whose loggers.
            title: goes after the prefix.
            draw: makes the picture, uint8 of shape (height, width, 3), or None where there is none to
                show. It is not called if no logger takes a picture, and once for all that do.
        """
        name, step, drawn = f"{self.prefix}/{title}", lightning_step(trainer), functools.cache(draw)
        self._for_each_logger(trainer, lambda logger: _write_image(logger, name, drawn, step))

    def _for_each_logger(self, trainer: pl.Trainer, write: Callable[[Logger], None]) -> None:
        if not self.has_readers(trainer):
            return
        for position, logger in enumerate(trainer.loggers):
            try:
                write(logger)
            except Exception as error:  # noqa: BLE001 (a receipt is never worth a crash of the training)
                self._warn_once(f"{type(logger).__name__} (logger {position})", error)

    def _warn_once(self, logger: str, error: Exception) -> None:
        if logger in self._warned:
            return
        self._warned.add(logger)
        warn(
            f"{logger} did not take the values of {self.prefix!r}: {type(error).__name__}: {error}. "
            "Training and the other loggers go on; this is said once.",
            stacklevel=4,
        )


class PhaseInProgressBar:
    """Shows the phase in the Trainer's progress bar, TQDM's or Rich's or any other.

    Works on the bar's instance: no subclass, and the bar is as before after :meth:`take_out`. A copy
    (pickle, deepcopy) of a bar in this state is an ordinary bar that shows no phase.
    """

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None

    def put(self, trainer: pl.Trainer, get_phase: Callable[[], str]) -> None:
        """Show what ``get_phase`` returns from now on; nothing happens without a progress bar."""
        self.take_out()
        bar = trainer.progress_bar_callback
        if bar is None or not callable(getattr(bar, "get_metrics", None)):
            return
        current, buried = bar.__dict__.get("get_metrics"), bar.__dict__.get("_hotcompile_phase")
        if buried is not None and getattr(current, "__func__", None) is not type(bar).get_metrics:
            buried.get_phase = get_phase  # somebody wrapped ours: wrapping theirs would make a circle
        else:
            bar.__dict__["_hotcompile_phase"] = _PhaseSource(get_phase, current)
            bar.__dict__["get_metrics"] = types.MethodType(get_metrics, bar)
        self._bar = bar

    def take_out(self) -> None:
        """Give the bar its own ``get_metrics`` back; may be called twice."""
        bar, self._bar = self._bar, None
        source = bar.__dict__.get("_hotcompile_phase") if bar is not None else None
        if bar is None or source is None:
            return
        source.get_phase = None
        if getattr(bar.__dict__.get("get_metrics"), "__func__", None) is not get_metrics:
            return  # wrapped by somebody: theirs stays, and ours adds nothing any more
        del bar.__dict__["_hotcompile_phase"], bar.__dict__["get_metrics"]
        if source.previous is not None:
            bar.__dict__["get_metrics"] = source.previous

    def __getstate__(self) -> dict[str, Any]:
        return {"_bar": None}


class _PhaseSource:
    """Where a bar finds the phase, and the ``get_metrics`` that was set on the instance before."""

    def __init__(self, get_phase: Callable[[], str] | None, previous: Callable[..., Any] | None) -> None:
        self.get_phase = get_phase
        self.previous = previous

    def __getstate__(self) -> dict[str, Any]:
        # The phase belongs to a callback in a running fit: a copied bar must not drag that along.
        return {"get_phase": None, "previous": self.previous}


class PhaseName(str):
    """The phase in a bar of the user's own, which may format what it shows as a number."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        try:
            return super().__format__(spec)
        except ValueError:
            return str(self)


# The name matters: a bound method is pickled by name, so an unpickled bar finds its class's own.
def get_metrics(bar: ProgressBar, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """The bar's own metrics and the phase; goes on the bar's instance."""
    source: _PhaseSource = bar.__dict__["_hotcompile_phase"]
    own = source.previous or types.MethodType(type(bar).get_metrics, bar)
    items = dict(own(trainer, pl_module))
    return items if source.get_phase is None else {**items, PROGRESS_BAR_NAME: PhaseName(source.get_phase())}


def lightning_step(trainer: pl.Trainer) -> int:
    """The step at which Lightning logs the metrics of the current training batch."""
    # Not global_step: that counts optimizer steps, of which one batch may have several.
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _write_metrics(logger: Logger, metrics: Mapping[str, float], step: int) -> None:
    _log_metrics_of(logger)(metrics=dict(metrics), step=step)  # as Lightning calls it
    logger.save()


def _log_metrics_of(logger: Logger) -> Callable[..., None]:
    """That of Lightning's TensorBoard or CSV logger, where a subclass from elsewhere has another one.

    That may keep a list by name and make a table of them at the end (NeuralProphet), and our numbers come at
    other steps. All else is written to as it wants to be: a service may take its steps in their order only.
    """
    for kind in type(logger).__mro__:
        package, _, module = str(kind.__module__).partition(".")
        own = vars(kind).get("log_metrics")
        if package in _LIGHTNING and module.endswith(_TO_FILES) and callable(own):
            return types.MethodType(own, logger)
    return logger.log_metrics


def _write_text(logger: Logger, name: str, markdown: str, step: int) -> None:
    log_text = getattr(logger, "log_text", None)
    add_text = None if callable(log_text) else getattr(getattr(logger, "experiment", None), "add_text", None)
    if callable(log_text):
        if {"columns", "data"} <= inspect.signature(log_text).parameters.keys():  # as in WandbLogger: a table
            log_text(name, columns=["text"], data=[[markdown]], step=step)
        else:
            log_text(name, markdown)
    elif callable(add_text):
        add_text(name, markdown, step)


def _write_image(logger: Logger, name: str, draw: Callable[[], Any], step: int) -> None:
    log_image = getattr(logger, "log_image", None)  # as in WandbLogger
    add_image = (
        None if callable(log_image) else getattr(getattr(logger, "experiment", None), "add_image", None)
    )
    image = draw() if callable(log_image) or callable(add_image) else None
    if image is None:
        return
    if callable(log_image):
        log_image(name, [image], step=step)
    elif callable(add_image):
        add_image(name, image, step, dataformats="HWC")
