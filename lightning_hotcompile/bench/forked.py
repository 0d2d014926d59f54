"""Processes for measurements that begin with what they need already imported.

Importing PyTorch and Lightning takes several seconds, more than many a training that is measured. Here it is
done once, in a process from which the others are forked; it does nothing but import.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

from lightning_hotcompile.bench.own_pages import make_pages_own
from lightning_hotcompile.bench.runs import RunTimedOut, run_alone, sigterm_as_exit


def run_forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> tuple[str, str, int]:
    """What ``main()`` of a module prints to stdout and to stderr, and the exit code of its process.

    As with :func:`~lightning_hotcompile.bench.runs.run_alone` nothing goes on that the process has started.
    Where processes cannot be forked from another one (Windows), ``python -m module`` is run.

    Raises:
        RunTimedOut: it took more than ``limit_s`` seconds.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return run_alone([sys.executable, "-m", module, *arguments], environment, limit_s)
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = _run(module, arguments, environment, limit_s, (str(out), str(err)))
        return _text(out), _text(err), code


def _run(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    files: tuple[str, str],
) -> int:
    process = _context(module).Process(  # type: ignore[attr-defined]  # the base class has none
        target=_child, args=(module, list(arguments), dict(environment), files), name=module
    )
    process.start()
    try:
        with sigterm_as_exit():
            process.join(limit_s)
        if process.exitcode is None:
            raise RunTimedOut(f"it took more than {limit_s:.0f} s")
        return int(process.exitcode)
    finally:
        for end in (os.killpg, os.kill):  # the second one if it has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                end(process.pid, signal.SIGKILL)
        process.join()


def _context(module: str) -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, module])  # once it runs this changes nothing
    return context


def _child(module: str, arguments: list[str], environment: dict[str, str], files: tuple[str, str]) -> None:
    """In the new process, in place of the interpreter's own start."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for anew, with this environment
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, file in enumerate(files, start=1):
        with open(file, "wb") as target:
            os.dup2(target.fileno(), number)
    sys.argv = [module, *arguments]
    make_pages_own()
    importlib.import_module(module).main()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
