"""Measures rows in fresh processes that share the toolchain's files and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_hotcompile.bench.measurement import OOM, ArmResult, Measurement, Request
from lightning_hotcompile.bench.runs import RunFailed, RunKilled, run_in_process
from lightning_hotcompile.bench.workloads.workload import COMPILED, EAGER

MODULE = "lightning_hotcompile.bench.one_measurement"

Measure = Callable[[Request, float], Measurement]
"""Measures one request within so many seconds."""

FIRST = Request(workload="simple", sizes={"batch_size": 8, "width": 16}, warmup=1, rounds=1)
"""Compiled once before all rows: the toolchain's own start is then behind us."""


@dataclass(frozen=True, kw_only=True)
class FreshProcess:
    """Starts a process for each request.

    Args:
        toolchain: a folder for what the compiler's toolchain keeps, the same for all rows.
        threads: of PyTorch's operations; 0 leaves the number to PyTorch.
    """

    toolchain: Path
    threads: int = 0

    def __call__(self, request: Request, limit_s: float) -> Measurement:
        """Measure; where the system ends the process, each half of the arms once more on its own.

        Raises:
            RunFailed: nothing could be measured; the message says what was printed last.
            RunTimedOut: it took more than ``limit_s``.
        """
        until = time.monotonic() + limit_s
        try:
            return self._run(request, limit_s)
        except RunKilled:
            return self._in_halves(request, until)

    def start_toolchain(self, device: str, backend: str) -> float:
        """Seconds that a first compile takes."""
        begin = time.monotonic()
        request = dataclasses.replace(FIRST, device=device, backend=backend)
        self._in_folder(request, 600.0, self._first_files)
        return time.monotonic() - begin

    @property
    def _first_files(self) -> Path:
        return self.toolchain / "first"

    def _run(self, request: Request, limit_s: float) -> Measurement:
        with tempfile.TemporaryDirectory(prefix="suite-") as folder:
            own = Path(folder) / "compiler"
            if self._first_files.is_dir():  # probes of the processor among them, which take seconds
                shutil.copytree(self._first_files, own)
            return self._in_folder(request, limit_s, own)

    def _in_folder(self, request: Request, limit_s: float, compiler_files: Path) -> Measurement:
        arguments = [json.dumps(request.to_dict()), "--threads", str(self.threads)]
        found = run_in_process(
            MODULE,
            arguments,
            self.toolchain,
            self.threads,
            limit_s=limit_s,
            compiler_files=compiler_files,
        )
        return Measurement.from_dict(found)

    def _in_halves(self, request: Request, until: float) -> Measurement:
        """One arm that is too large for the machine must not hide the others."""
        halves: list[Measurement] = []
        error: RunFailed | None = None
        for only in (EAGER, COMPILED):
            try:
                left = max(1.0, until - time.monotonic())
                halves.append(self._run(dataclasses.replace(request, only=only), left))
            except RunKilled as killed:
                error = killed
                halves.append(_killed(only, killed))
        if error is not None and all(not arm.laps for half in halves for arm in half.arms.values()):
            raise error
        return halves[0].joined(halves[1])


def _killed(only: str, error: RunFailed) -> Measurement:
    from_the_system = ArmResult(
        compiled=only == COMPILED, status=OOM, reason=f"{error}, as systems do when memory is short"
    )
    return Measurement(arms={only: from_the_system})
