"""Starts the trainings of the suite ``regret``, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hotcompile.bench.forked import run_forked
from lightning_hotcompile.bench.runs import MOST_SECONDS, Run, environment_for, last_json

_ONE_RUN = "lightning_hotcompile.bench.one_run"


@dataclass(frozen=True, kw_only=True)
class ProcessRunner:
    """Runs each training in a process of its own.

    Args:
        threads: of PyTorch's operations; 0 leaves the number to PyTorch.
        options: of the callback.
    """

    threads: int = 0
    options: Mapping[str, Any] | None = None

    def __call__(self, case: str, arm: str, steps: int, marks: Sequence[int], folder: Path) -> Run:
        """Train once with the compiler's files in ``folder``; with a folder of its own a run is cold.

        Raises:
            RunFailed: the process failed or took too long; the message says what it printed last.
        """
        arguments = [case, arm, str(steps), "--marks", *map(str, marks), "--threads", str(self.threads)]
        arguments += ["--options", json.dumps(dict(self.options or {}))]
        environment = environment_for(arm, folder, self.threads)
        return Run.from_dict(last_json(*run_forked(_ONE_RUN, arguments, environment, MOST_SECONDS)))
