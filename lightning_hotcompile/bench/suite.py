"""A suite: its rows, measured one after the other and kept at once."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_hotcompile.bench import outputs, provenance
from lightning_hotcompile.bench.answers import answers
from lightning_hotcompile.bench.fresh_process import FreshProcess, Measure
from lightning_hotcompile.bench.kept import Kept
from lightning_hotcompile.bench.measurement import ERROR, OOM, SKIPPED, TIMEOUT, Request
from lightning_hotcompile.bench.progress import progress_bar
from lightning_hotcompile.bench.record_file import RecordFile
from lightning_hotcompile.bench.records import Record
from lightning_hotcompile.bench.rows import Row, chosen, names_in, rows_of
from lightning_hotcompile.bench.runs import RunFailed, RunKilled, RunTimedOut
from lightning_hotcompile.bench.workloads.catalogue import DETECTOR
from lightning_hotcompile.errors import ConfigError, near_names
from lightning_hotcompile.receipt.wording import count

SIZES = ("quick", "default", "full")
_START_S, _MEASURING_S = 20.0, 10.0
"""A process with its compile, and measuring, until the first row has told what they take here."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Measures rows; what is finished in a folder is not measured again.

    Raises:
        ConfigError: an unknown size, device, format, workload or case, or a number that is too small.
    """

    name: str
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    """By size (``quick``, ``default``, ``full``): entries as :func:`rows_of` takes them."""

    budget_s: Mapping[str, float | None] = field(
        default_factory=lambda: {"quick": 120.0, "default": 600.0, "full": None}
    )
    """No row is begun that would end later; by size, ``None`` for no limit."""

    warmup: int = 10
    rounds: int = 100
    seconds: float = 10.0
    """Of measuring a row, after which it has enough rounds if it has 10."""

    row_limit_s: float = 900.0
    size: str = "default"
    device: str = "cpu"
    backend: str = "inductor"
    formats: Sequence[str] | str = tuple(outputs.FORMATS)
    """One or several of :data:`lightning_hotcompile.bench.outputs.FORMATS`; the JSON is there in any case."""

    cases: Sequence[str] = ()
    """Names of cases or rows; none means all."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            hint = near_names(str(self.size), SIZES)
            raise ConfigError(f"size={self.size!r} is unknown: use {', '.join(SIZES)}{hint}.")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown: use cpu or cuda.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device='cuda' needs a CUDA device, and PyTorch finds none: use device=cpu.")
        for name in ("warmup", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not allowed: give 1 or more.")
        outputs.check_formats(self.wanted_formats)
        for entries in self.rows.values():
            rows_of(entries)
        self.chosen_rows()

    @property
    def wanted_formats(self) -> list[str]:
        """The formats as a list."""
        return [self.formats] if isinstance(self.formats, str) else list(self.formats)

    def chosen(self, case: object, quick: bool) -> Suite:
        """The suite with what was asked for: one case or row, several, ``all``, or None for all."""
        return dataclasses.replace(self, cases=names_in(case), size="quick" if quick else self.size)

    def chosen_rows(self) -> list[Row]:
        """Those that will be measured."""
        rows = rows_of(self.rows.get(self.size) or self.rows["default"])
        for name in self.cases:
            found = [size for size, entries in self.rows.items() if _names(rows_of(entries)) >= {name}]
            if found and name not in _names(rows):
                raise ConfigError(f"case={name!r} is not in size={self.size}: use size={found[0]}.")
        return chosen(rows, self.cases) if self.cases else rows

    def run(
        self,
        folder: Path,
        *,
        threads: int = 0,
        command: str = "",
        measure: Measure | None = None,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> list[Record]:
        """Measure what is not in ``folder`` yet, write all files, and return the records.

        Raises:
            OtherResults: the folder has results of another machine, version or option.
            CannotWrite: the folder does not take files.
        """
        kept, console = self.kept(folder, threads), console or Console()
        with tempfile.TemporaryDirectory(prefix="toolchain-") as toolchain:
            runner = measure or FreshProcess(toolchain=Path(toolchain), threads=threads)
            facts = {**provenance.origin(command), "size": self.size}
            work = _Work(self, kept, runner, console, now)
            if isinstance(runner, FreshProcess) and any(r.workload != DETECTOR for r in work.left):
                work.start(runner, facts)
            try:
                work.all_rows(lambda: kept.write(facts, ()))
            except (KeyboardInterrupt, SystemExit):
                console.print(f"stopped; the same output_dir goes on: {folder}", markup=False, soft_wrap=True)
                raise
        records = kept.write(facts, self.wanted_formats)
        for question, lines in answers(records).items():
            console.print(f"[bold]{question}[/bold]")
            for line in lines:
                console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)
        return records

    def kept(self, folder: Path, threads: int) -> Kept:
        """What was measured into ``folder`` before, under the same conditions.

        Raises:
            OtherResults: the folder has results of another machine, version or option.
            CannotWrite: the folder does not take files.
        """
        setting = {**provenance.setting(threads), "threads": threads, "device": self.device}
        setting |= {name: getattr(self, name) for name in ("backend", "warmup", "rounds", "seconds")}
        if self.device == "cuda":
            setting["gpu"] = torch.cuda.get_device_name()
        return Kept(RecordFile(folder / f"{self.name}.json", setting), self.name)

    def request(self, row: Row) -> Request:
        """What a row's process is asked for."""
        return Request(
            workload=row.workload,
            sizes=row.sizes,
            device=self.device,
            warmup=self.warmup,
            rounds=self.rounds,
            seconds=self.seconds,
            backend=self.backend,
        )


def _names(rows: Sequence[Row]) -> set[str]:
    return {name for row in rows for name in (row.case, row.key)}


class _Work:
    """What is left to do, within the budget."""

    def __init__(
        self, suite: Suite, kept: Kept, measure: Measure, console: Console, now: Callable[[], float]
    ) -> None:
        self._suite, self._kept, self._measure, self._console, self._now = suite, kept, measure, console, now
        self._began = now()
        self._row_s: float = kept.facts.get("row_s", _START_S + min(suite.seconds, _MEASURING_S))
        self.left = [row for row in suite.chosen_rows() if not kept.is_done(row)]
        self._budget = suite.budget_s.get(suite.size)

    def start(self, runner: FreshProcess, facts: Mapping[str, Any]) -> None:
        """A compile that is not measured."""
        self._console.print("a compile that is not measured: the toolchain's own start", soft_wrap=True)
        try:
            seconds = runner.start_toolchain(self._suite.device, self._suite.backend)
        except RunFailed as error:
            self._console.print(f"it failed: {error}", markup=False, soft_wrap=True)
            return
        self._kept.facts["toolchain_s"] = round(seconds, 1)

    def all_rows(self, write: Callable[[], object]) -> None:
        """Row after row; a failure in one ends nothing."""
        with progress_bar(self._console) as progress:
            bar = progress.add_task("", total=len(self.left))
            limit = "no limit" if self._budget is None else f"at most {self._budget / 60:.1f} min"
            self._console.print(
                f"suite {self._suite.name}: {count(len(self.left), 'row')}, about "
                f"{len(self.left) * self._row_s / 60:.1f} min, {limit}",
                soft_wrap=True,
            )
            for row in self.left:
                progress.update(bar, description=row.key)
                self._one(row)
                progress.advance(bar)
                for record in self._kept.records_for(row):
                    self._console.print(outputs.words(record), highlight=False, markup=False, soft_wrap=True)
                write()  # at once: whoever stops here loses nothing

    def _one(self, row: Row) -> None:
        begin, left = self._now(), self._left_s()
        if left < self._row_s:
            spent = f"the time budget of {self._budget:.0f} s has {max(0.0, left):.0f} s left"
            self._kept.add_failure(row, SKIPPED, f"{spent}, a row takes about {self._row_s:.0f} s")
            return
        try:
            self._kept.add(row, self._measure(self._suite.request(row), min(left, self._suite.row_limit_s)))
        except RunTimedOut as error:
            self._kept.add_failure(row, TIMEOUT, str(error))
        except RunKilled as error:
            self._kept.add_failure(row, OOM, f"{error}, as systems do when memory is short")
        except RunFailed as error:
            self._kept.add_failure(row, ERROR, str(error))
        self._row_s = max(1.0, self._now() - begin)
        self._kept.facts["row_s"] = round(self._row_s, 1)

    def _left_s(self) -> float:
        spent = self._now() - self._began
        return float("inf") if self._budget is None else self._budget - spent
