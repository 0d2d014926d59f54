"""Programs that tests start, forked from a process that has imported what they need.

That saves each of them the seconds of importing PyTorch and Lightning. A few tests start their program as a
user does, as only that shows whether it can be started.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import lightning_hotcompile.callback  # noqa: F401  # with PyTorch and Lightning
from lightning_hotcompile.bench.forked import run_forked

for name in ("hydra", "pandas", "sklearn.datasets", "torchmetrics", "torch.utils.tensorboard"):
    with contextlib.suppress(ImportError):  # of the extra 'recipes'
        importlib.import_module(name)

TIME_LIMIT_S = 500


def in_a_fork(
    folder: Path, program: Path | str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a script, or a module of which the name is given, did in that folder."""
    given = [str(each) for each in (folder, program, *arguments)]
    out, err, code = run_forked(__name__, given, os.environ if env is None else env, TIME_LIMIT_S)
    return subprocess.CompletedProcess(given[1:], code, out, err)


def main() -> None:
    """In the new process: run the program as the interpreter would."""
    _, folder, program, *arguments = sys.argv
    os.chdir(folder)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
