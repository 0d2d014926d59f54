"""A child process that fills the compiler's caches while training goes on.

The child gets captured graphs, not modules: bytes made by ``graphfile.pack``. It compiles them, forward
and backward, at low priority into the same cache directory; a later compile of the same graph in this
process finds both. Of an optimizer it gets a description and captures the graph by itself. Nothing that
happens to the child reaches the training: it only has a reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_hotcompile.swap.prewarm.process import ChildProcess

_WORKER = "lightning_hotcompile.swap.prewarm.worker"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One graph to compile: a name for people, and what says which graph.

    ``kind`` is ``graph`` for the bytes of ``graphfile.pack``, ``optimizer`` for those of
    ``optimizerfile.pack_optimizer``.
    """

    name: str
    graph: bytes
    kind: str = "graph"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one piece of work went: seconds in the child, its error, and whether the caches have it now.

    ``new``: the child has compiled it, where else it has found it in the caches.
    """

    name: str
    seconds: float
    error: str | None
    cached: bool
    new: bool = False


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where the child stands.

    ``state`` is ``running``, ``done`` (all that was handed over is compiled; the child may be waiting for
    more), ``failed`` with the reason, or ``crashed``: ended by a fault of the compiler or of its code, or
    by the system for want of memory.
    ``seconds`` is the wall time since the start, until the child had done its work or was gone.
    """

    state: str
    reason: str | None
    seconds: float
    results: tuple[Result, ...]


class Prewarm:
    """One child process, its jobs and its end.

    Call it from the main thread: on Linux the child ends with the thread that started it.

    Args:
        cache_dir: the compiler's cache directory, the same as ``TORCHINDUCTOR_CACHE_DIR`` of this process.
        toolchain: devices (``cpu``, ``cuda:1``) whose compiler is started before all else.
        threads: OpenMP threads of the child; the code it makes is for the threads of this process.
        limit_s: seconds that one piece of work may take, ``None`` for no limit; then the child is ended.
        now: a clock in seconds.
        worker: the command that compiles, for tests.
    """

    def __init__(
        self,
        *,
        cache_dir: str | os.PathLike[str],
        toolchain: Sequence[str] = (),
        threads: int = 1,
        limit_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
        worker: Sequence[str] | None = None,
    ) -> None:
        self._cache_dir = Path(cache_dir).absolute()
        self._toolchain = tuple(toolchain)
        self._threads = threads
        self._limit_s = limit_s
        self._now = now
        self._worker = list(worker) if worker else [sys.executable, "-m", _WORKER]
        self._names: dict[str, str] = {}
        self._results: dict[str, Result] = {}
        self._child: ChildProcess | None = None
        self._final: Status | None = None
        self._started = self._last_added = self._last_result = 0.0
        self._started_at = self._done_at = 0.0  # by the clock of the files

    @property
    def pid(self) -> int | None:
        """The child's process id, which is also its process group's; ``None`` before the start."""
        return self._child.pid if self._child else None

    @property
    def work_s(self) -> float:
        """Seconds from the start until the child wrote its last result, whenever that was looked at."""
        return self._done_at - self._started_at

    @property
    def _last_begun(self) -> float:
        """When the child began with the piece that it is at, at the latest: it does one after the other."""
        return max(self._last_added, self._last_result)

    def start(self) -> Prewarm:
        """Start the child; an error of the operating system is a reason, not an exception."""
        self._started = self._last_added = self._last_result = self._now()
        self._started_at = self._done_at = time.time()
        try:
            self._child = ChildProcess(self._worker, cache_dir=self._cache_dir, threads=self._threads)
        except OSError as error:
            self._finish("failed", f"the child process could not be started: {error}")
            return self
        for device in self._toolchain:
            self._hand_over(f"toolchain-on-{device}", f"toolchain ({device})")
        return self

    def add(self, job: Job) -> None:
        """Hand over one more graph to a child that was started; after its end nothing happens."""
        if self._final is not None:
            return
        assert self._child is not None
        file = f"{job.kind}-{len(self._names):04d}"
        try:
            (self._child.folder / file).write_bytes(job.graph)
        except OSError as error:
            self._finish("failed", f"a graph could not be written for the child: {error}")
            return
        self._hand_over(file, job.name)

    def poll(self) -> Status:
        """Look at the child without waiting for it."""
        if self._final is not None:
            return self._final
        if self._child is None:
            return self._status("running", None)
        ended = self._child.ended()
        self._read_results()
        if len(self._results) == len(self._names):
            failed = [r for r in self._results.values() if r.error]
            if failed and len(failed) == len(self._results):
                self._finish("failed", f"{failed[0].name}: {failed[0].error}")
            elif ended is not None:
                self._finish("done", None)
            return self._final or self._status("done", None)
        if ended is not None:
            state = "crashed" if self._child.has_crashed else "failed"
            self._finish(state, f"the child process {ended}{self._child.last_words()}")
        elif self._limit_s is not None and self._now() - self._last_begun > self._limit_s:
            self._finish("failed", f"the child process took longer than {self._limit_s:g} s for one piece")
        return self._final or self._status("running", None)

    def close(self) -> None:
        """No more graphs: the child ends when it has done those that it has."""
        if self._child is not None:
            self._child.no_more()

    def cancel(self, reason: str = "cancelled") -> Status:
        """End the child and all that it has started, and remove its folder; a second call does nothing.

        What was done by then stays in the cache, and the status says so.
        """
        status = self.poll()
        if self._final is None:
            self._finish(*(("done", None) if status.state == "done" else ("failed", reason)))
        return self.poll()

    def __enter__(self) -> Prewarm:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _hand_over(self, file: str, name: str) -> None:
        assert self._child is not None
        self._names[file] = name
        self._last_added = self._now()
        self._child.tell(file)

    def _read_results(self) -> None:
        assert self._child is not None
        for file, name in self._names.items():
            path = self._child.folder / f"{file}.json"
            if file not in self._results and path.exists():
                self._results[file] = Result(name=name, **json.loads(path.read_text(encoding="utf-8")))
                self._last_result = self._now()
                self._done_at = max(self._done_at, path.stat().st_mtime)

    def _status(self, state: str, reason: str | None) -> Status:
        until = self._last_result if state == "done" else self._now()
        seconds = until - self._started if self._child else 0.0
        return Status(state=state, reason=reason, seconds=seconds, results=tuple(self._results.values()))

    def _finish(self, state: str, reason: str | None) -> None:
        self._final = self._status(state, reason)
        if self._child is not None:
            self._child.end()
