"""All suites one after the other, and one rule of thumb from them."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lightning_hotcompile.bench import outputs, provenance
from lightning_hotcompile.bench.fresh_process import FreshProcess, Measure
from lightning_hotcompile.bench.records import Record
from lightning_hotcompile.bench.rows import names_in
from lightning_hotcompile.bench.runs import RunFailed
from lightning_hotcompile.bench.suite import Suite
from lightning_hotcompile.errors import ConfigError, near_names


@dataclass(frozen=True, kw_only=True)
class AllSuites:
    """Runs suites, each into a folder of its own name."""

    suites: Mapping[str, Suite]
    budget_s: Mapping[str, float | None] = field(default_factory=lambda: {"quick": 570.0})
    """For all of them together, the toolchain's start included; by size, no limit for others."""

    def chosen(self, case: object, quick: bool) -> AllSuites:
        """The same with what was asked for.

        Args:
            case: names of suites; None or ``all`` for all of them.
            quick: each suite's few rows.

        Raises:
            ConfigError: there is no such suite.
        """
        names = names_in(case) or list(self.suites)
        for name in names:
            if name not in self.suites:
                hint = near_names(str(name), self.suites)
                raise ConfigError(
                    f"case={name!r} is no suite; with suite=all use {', '.join(self.suites)}{hint}."
                )
        return dataclasses.replace(
            self, suites={name: self.suites[name].chosen(None, quick) for name in names}
        )

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
        """Measure what is not in ``folder`` yet, write all files, and return all records.

        Raises:
            OtherResults: the folder has results of another machine, version or option, of any suite.
            CannotWrite: the folder does not take files.
        """
        console, began = console or Console(), now()
        for suite in self.suites.values():  # before anything is measured
            suite.kept(folder / suite.name, threads)
        records: list[Record] = []
        with tempfile.TemporaryDirectory(prefix="toolchain-") as toolchain:
            for suite in self.suites.values():
                runner = measure or self._process(Path(toolchain), threads, suite, console)
                records += self._limited(suite, now() - began).run(
                    folder / suite.name, threads=threads, command=command, measure=runner, console=console
                )
                self._write(folder, records, {**provenance.setting(threads), **provenance.origin(command)})
        return records

    def _limited(self, suite: Suite, spent_s: float) -> Suite:
        """The suite with no more time than is left for all."""
        ours, its = self.budget_s.get(suite.size), suite.budget_s.get(suite.size)
        if ours is None:
            return suite
        left = max(0.0, ours - spent_s)
        return dataclasses.replace(suite, budget_s={suite.size: left if its is None else min(its, left)})

    def _process(self, toolchain: Path, threads: int, suite: Suite, console: Console) -> Measure:
        """The toolchain is started once, not for each suite."""
        process = FreshProcess(toolchain=toolchain, threads=threads)
        if not (toolchain / "started").exists():
            console.print("a compile that is not measured: the toolchain's own start", soft_wrap=True)
            try:
                process.start_toolchain(suite.device, suite.backend)
            except RunFailed as error:
                console.print(f"it failed: {error}", markup=False, soft_wrap=True)
            (toolchain / "started").touch()
        return process.__call__

    def _write(self, folder: Path, records: Sequence[Record], facts: Mapping[str, object]) -> None:
        formats = next(iter(self.suites.values())).wanted_formats
        outputs.write(folder, "all", _named(records), facts, [f for f in formats if f != "png"])


def _named(records: Sequence[Record]) -> list[Record]:
    """Suites have rows of the same name: the suite goes into the name."""
    return [{**r, **{name: f"{r['suite']}: {r[name]}" for name in ("case", "row")}} for r in records]
