"""The parent's end of the leash: one child process, its private folder, and how both end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.prewarm import child, leftovers

_ROOT = Path(__file__).parents[3]

CRASHES = frozenset(["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL"])
"""How code ends its process, and the system one for which there is no memory: it may do so to the training.

By their names: Windows does not know all of them.
"""


class ChildProcess:
    """A worker in a process group of its own, which ends with this object or with this process.

    Args:
        worker: the command that does the work; it gets the folder as its last argument.
        cache_dir: the compiler's cache directory; the child's folder is made in it.
        threads: OpenMP threads of the worker.

    Raises:
        OSError: the folder or the process could not be made.
    """

    def __init__(self, worker: Sequence[str], *, cache_dir: Path, threads: int) -> None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        leftovers.remove_left(cache_dir, time.time())
        self.folder = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX, dir=cache_dir))  # mode 0700
        leash, ours = os.pipe()  # the child reads the end of file when nobody holds our end any more
        settings = {
            "parent": os.getpid(),
            "leash": leash,
            "worker": list(worker),
            "headers": inductor_paths.headers_in_use(),
        }
        try:
            (self.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
            self._process = _launch(self.folder, leash, _environment(cache_dir, threads))
        except BaseException:
            os.close(ours)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(leash)
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, ours, self.folder)

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Write a line to the worker's standard input; to one that is gone, nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def no_more(self) -> None:
        """Close the worker's standard input, after a line that says so.

        A fork of the training (a data loader's worker) may hold it open for as long as it lives.
        """
        assert self._process.stdin is not None
        self.tell("")
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def ended(self) -> str | None:
        """How the process ended, ``None`` while it is there."""
        status = self._process.poll()
        if status is None:
            return None
        number = _signal_of(status)
        if number is None:
            return f"ended with status {status}"
        name = number.name
        hint = " (perhaps by the system, for want of memory)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"

    @property
    def has_crashed(self) -> bool:
        """Whether the process has ended, by its own code or for want of memory."""
        status = self._process.poll()
        found = None if status is None else _signal_of(status)
        return found is not None and found.name in CRASHES

    def last_words(self) -> str:
        """The last line that the process has written, after a colon."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line.strip() for line in lines if line.strip()]
            return f": {said[-1][:200]}" if said else ""
        return ""


def _signal_of(status: int) -> signal.Signals | None:
    """What ended the worker; the exit status is the watcher's own, or 128 and the worker's signal."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def _launch(folder: Path, leash: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    with (folder / "log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            # -I: nothing of the user's environment or folder comes in its way
            [sys.executable, "-I", child.__file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            cwd=folder,
            env=environment,
            pass_fds=(leash,),
            start_new_session=True,
        )


def _environment(cache_dir: Path, threads: int) -> dict[str, str]:
    path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if _ROOT.name not in ("site-packages", "dist-packages"):  # else Python finds us by itself
        path.append(str(_ROOT))
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def _end(owner: int, process: subprocess.Popen[str], leash: int, folder: Path) -> None:
    if os.getpid() != owner:
        return  # a fork of the training, a data loader's worker for example: the child is not its own
    if process.poll() != 0:  # after 0 there is nobody left in the group, and its id may be another's
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    os.close(leash)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    shutil.rmtree(folder, ignore_errors=True)
