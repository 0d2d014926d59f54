"""One training as a benchmark sees it, and how to start it in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hotcompile.bench.arms import HOTCOMPILE, PREPARING
from lightning_hotcompile.errors import HotCompileError

MOST_SECONDS = 1800.0
"""A training that takes longer is ended, and named as failed."""

_NAMES_AN_ERROR = re.compile(r"(\w+\.)*[A-Z]\w*(Error|Exception|Failed|Unsupported): ")

_NOT_INHERITED = ("HOTCOMPILE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "OMP_NUM_THREADS")


class RunFailed(HotCompileError):
    """An arm could not train a case."""


class RunTimedOut(RunFailed):
    """A process took too long and was ended."""


class RunKilled(RunFailed):
    """A process was ended by somebody else: mostly the system, when memory is short."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A training after some number of steps."""

    elapsed_s: float
    """Since the first step began."""

    steady_s: float
    """Of a step, from the second half of those so far."""

    weights: float
    """Norm of all weights."""

    moved: float
    """Norm of the distance from the first weights."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; its times but for the worst step are those of a reference machine, see :mod:`.pace`."""

    steps: int
    wall_s: float
    """All of ``Trainer.fit``."""

    before_s: float
    """From the start of ``Trainer.fit`` to the first step."""

    worst_step_s: float
    mean_s: float
    """Mean of a step in the second half, the slow ones included."""

    marks: Mapping[int, Mark]
    """By number of steps; the last one is the end."""

    phase: str = ""
    reason: str = ""
    clock_s: float | None = None
    """All of ``Trainer.fit`` by the clock, where the other times are those of a reference machine."""

    @property
    def end(self) -> Mark:
        """After the last step."""
        return self.marks[self.steps]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Read what :meth:`to_dict` gave, also after a way through JSON."""
        return cls(**{**data, "marks": {int(n): Mark(**mark) for n, mark in data["marks"].items()}})


def run_in_process(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    threads: int,
    *,
    limit_s: float = MOST_SECONDS,
    compiler_files: Path | None = None,
) -> dict[str, Any]:
    """What ``python -m module`` prints last; the store and the compiler's files are in ``folder``.

    Args:
        module: name of the module.
        arguments: of its command line.
        folder: for all files that are kept.
        threads: of PyTorch's operations; 0 leaves the number to PyTorch.
        limit_s: seconds after which the process is ended.
        compiler_files: a folder of its own for compiled code; the toolchain's files stay in ``folder``.

    Raises:
        RunFailed: the process failed; the message says what it printed last.
        RunTimedOut: it took too long.
        RunKilled: it was ended by a signal.
    """
    environment = environment_for(HOTCOMPILE, folder, threads)
    if compiler_files is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiler_files)
    return last_json(*run_alone([sys.executable, "-m", module, *arguments], environment, limit_s))


def last_json(out: str, err: str, code: int) -> dict[str, Any]:
    """The last line of JSON that a process has printed.

    Raises:
        RunFailed: it failed; the message says what it printed last.
        RunKilled: it was ended by a signal.
    """
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code < 0:
        raise RunKilled(f"it was ended by signal {-code}")
    if code or not lines:
        raise RunFailed(_error_in(err) or f"exit code {code}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_alone(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[str, str, int]:
    """What a command prints to stdout and to stderr, and its exit code.

    However this ends, nothing that the command started goes on: a C++ compiler that nobody waits for would
    make the next measurement slow.

    Raises:
        RunTimedOut: it took more than ``limit_s`` seconds.
    """
    process: subprocess.Popen[str] | None = None
    try:
        with sigterm_as_exit():
            with _ended_later():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RunTimedOut(f"it took more than {limit_s:.0f} s") from None
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return out, err, process.returncode


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does, so that it can end what it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


@contextlib.contextmanager
def _ended_later() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: between the start of a process and its number there is nothing to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    usual = {
        n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def environment_for(arm: str, folder: Path, threads: int) -> dict[str, str]:
    """The environment of one training; everything that a compiler keeps goes below ``folder``.

    The precompiled C++ header lies below the temporary folder, so that is part of it. The callback gets
    its store only: it points the compiler there as long as nobody has chosen another folder.
    """
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    ours = {"TMPDIR": str(folder / "tmp"), "HOTCOMPILE_STORE": str(folder / "store")}
    if arm not in (HOTCOMPILE, PREPARING):
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiler")
    if threads:
        ours["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" in os.environ:
        ours["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith("HOTCOMPILE_")
    }
    return {**kept, **ours}


def _error_in(text: str) -> str:
    """The line that names the error, or else the last one: after torch's errors there are hints."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _NAMES_AN_ERROR.match(line)]
    return [*lines, *named][-1].strip()[:500] if lines else ""
