"""A folder in which one case of the suite ``regret`` was compiled before it is measured."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_hotcompile.bench.arms import PREPARING
from lightning_hotcompile.bench.runs import Run

Runner = Callable[[str, str, int, Sequence[int], Path], Run]
"""Trains a case by an arm for so many steps, with marks, in a folder."""

PREPARING_STEPS = 200
"""Enough for a verdict on what was compiled, and on the optimizer's kernel."""


class PreparedFolder(contextlib.AbstractContextManager["PreparedFolder"]):
    """The folder of one case at a time, in which it was compiled whatever it cost.

    Args:
        runner: does the training that compiles.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._case: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def of(self, case: str) -> Path:
        """The folder of this case; that of the case before is gone then.

        Raises:
            RunFailed: the training that is to compile cannot be done.
        """
        if self._folder is None or self._case != case:
            self.__exit__()
            self._folder = tempfile.TemporaryDirectory(prefix="regret-")
            self._runner(case, PREPARING, PREPARING_STEPS, (), Path(self._folder.name))
            self._case = case
        return Path(self._folder.name)

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        folder, self._folder, self._case = self._folder, None, None
        if folder is not None:
            folder.cleanup()
