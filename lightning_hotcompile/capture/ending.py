"""How a training is ended from within a callback, with as few traces as possible."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any, NoReturn

from lightning_hotcompile.errors import HotCompileError


class TrainingEnded(SystemExit):
    """Ends the script in the middle of ``fit``, with exit code 0.

    To Lightning it is an exception: callbacks are told by ``on_exception``, the model is given back, no
    validation and no end of the epoch follow. What the script does after ``fit`` is not run: it would take a
    model that was trained for some steps for the result.
    """

    def __init__(self) -> None:
        super().__init__(0)


class WorkerEnded(HotCompileError):
    """The same in a process that the script has started (``ddp_spawn``).

    The script waits for what such a process returns, and goes on waiting if it just ends.
    """


def end_training(trainer: Any, but_for: tuple[type[Any], ...]) -> NoReturn:
    """End the training of a Trainer now; callbacks that are ``but_for`` are not told: they would save it.

    Raises:
        TrainingEnded: in the script's own process.
        WorkerEnded: in one that it has started.
    """
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, but_for)]
    if multiprocessing.parent_process() is None:
        raise TrainingEnded
    raise WorkerEnded("the training is ended here on purpose: all that was asked for is known")


def write_whole(file: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
