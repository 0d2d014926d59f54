"""A suite with a row for each case and each way to run it, each measured in a process of its own."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd  # type: ignore[import-untyped]
from rich.console import Console

from lightning_hotcompile.bench import provenance
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.kept_rows import FAILED, OF_A_ROW, KeptRows, Row, all_of
from lightning_hotcompile.bench.record_file import writing
from lightning_hotcompile.bench.rows import cases_in, check_names
from lightning_hotcompile.bench.runs import RunFailed, run_in_process
from lightning_hotcompile.errors import ConfigError

Runner = Callable[[str, str, Mapping[str, Any], Path], dict[str, Any]]
"""Measures a case in one way, with options of the callback and an empty folder for compiled code."""


@dataclass(frozen=True, kw_only=True)
class CaseSuite(ABC):
    """Measures cases.

    Raises:
        ConfigError: an unknown case.
    """

    name: ClassVar[str]
    """Of the suite and of its files."""

    how_much: ClassVar[tuple[str, ...]]
    """Names of the numbers that say how much is measured: equal ones for rows to stand on one page."""

    cases: Sequence[str]
    quick_cases: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the callback for all rows."""

    def __post_init__(self) -> None:
        check_names("cases", (*self.cases, *self.quick_cases), CASES)

    def _at_least(self, **least: int) -> None:
        """Check the suite's numbers of these names."""
        for name, number in least.items():
            if (value := getattr(self, name)) < number:
                raise ConfigError(f"{name}={value!r} is not allowed: give {number} or more.")

    @property
    @abstractmethod
    def ways(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of the callback for each way to run a case, by the name that its row has as ``plan``."""

    @abstractmethod
    def arguments(self, case: str, plan: str) -> tuple[str, list[str]]:
        """The module that measures a row, and what it is told beside threads and options."""

    @abstractmethod
    def line(self, row: Row) -> str:
        """A row for the console."""

    @abstractmethod
    def page(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
        """All rows as Markdown."""

    def files(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, str]:
        """Contents of the files beside the JSON, by name."""
        return {
            f"{self.name}.csv": self.frame(rows).to_csv(index=False),
            f"{self.name}.md": self.page(rows, facts),
        }

    def frame(self, rows: Sequence[Row]) -> pd.DataFrame:
        """All rows, flat."""
        return pd.DataFrame(rows)

    def chosen(self, case: object, quick: bool) -> CaseSuite:
        """The suite with what was asked for: one case, several, ``all``, or None for the suite's own."""
        chosen = cases_in(case) or list(self.quick_cases if quick else self.cases)
        return type(self)(**{**vars(self), "cases": chosen})

    def run(
        self,
        folder: Path,
        *,
        threads: int = 0,
        command: str = "",
        runner: Runner | None = None,
        console: Console | None = None,
    ) -> list[Row]:
        """Measure what is not in ``folder`` yet, write all results, and return the rows.

        Raises:
            OtherResults: the folder has results of another machine, version or option.
            CannotWrite: the folder does not take files.
        """
        runner, console = runner or self.runner_for(threads), console or Console()
        kept = self.kept(folder, threads)
        facts = {**provenance.setting(threads), **provenance.origin(command)}
        for case, (plan, options) in product(self.cases, self.ways.items()):
            if kept.is_done(case, plan):
                continue
            measured = _measured(runner, case, plan, {**self.options, **options})
            row = {"case": case, "plan": plan, **measured, **{name: facts[name] for name in OF_A_ROW}}
            kept.add(row)
            console.print(self.line(row), highlight=False, markup=False, soft_wrap=True)
            self._write(folder, kept, facts)  # at once: whoever stops here loses nothing
        return self._rows(kept)

    def kept(self, folder: Path, threads: int) -> KeptRows:
        """What was measured into ``folder`` before, under the same conditions but for the commit.

        Raises:
            OtherResults: the folder has results of another machine, version or option.
            CannotWrite: the folder does not take files.
        """
        of_machine = {k: v for k, v in provenance.setting(threads).items() if k not in OF_A_ROW}
        setting = {**of_machine, "threads": threads, "options": dict(self.options)}
        setting |= {name: getattr(self, name) for name in self.how_much}
        return KeptRows(folder / f"{self.name}.json", setting, self.ways)

    def runner_for(self, threads: int) -> Runner:
        """What measures a row, in processes of its own."""

        def run(case: str, plan: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
            module, given = self.arguments(case, plan)
            given = [*given, "--threads", str(threads), "--options", json.dumps(options)]
            return run_in_process(module, given, folder, threads)

        return run

    def _rows(self, kept: KeptRows) -> list[Row]:
        return kept.rows(product(self.cases, self.ways))

    def _write(self, folder: Path, kept: KeptRows, facts: Mapping[str, Any]) -> None:
        """The JSON and what else there is, in the order of the cases and ways."""
        rows = self._rows(kept)
        facts = {**facts, **{name: all_of(rows, name) for name in OF_A_ROW}}
        kept.write(rows, facts)
        for name, content in self.files(rows, facts).items():
            with writing(folder):
                (folder / name).write_text(content, encoding="utf-8")


def _measured(runner: Runner, case: str, plan: str, options: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        try:
            return runner(case, plan, options, Path(folder))
        except RunFailed as error:
            return {"phase": FAILED, "reason": str(error)}


def origin(facts: Mapping[str, Any]) -> str:
    """Where numbers come from, as a list in Markdown."""
    lines = [
        f"- {name}: {facts[name]}" for name in ("command", "date", "commit", "machine") if facts.get(name)
    ]
    lines.append(f"- versions: {', '.join(f'{k} {v}' for k, v in facts.get('versions', {}).items())}")
    return "\n".join(lines)
