"""The suite ``scopes``: what each scope gains on each case, and the prior that the forecast takes from it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from rich.console import Console

from lightning_hotcompile.bench import provenance
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.regret import geometric_mean
from lightning_hotcompile.bench.runs import RunFailed, run_in_process
from lightning_hotcompile.errors import ConfigError, near_names
from lightning_hotcompile.plan.prior import fitted

Runner = Callable[[str, Mapping[str, Any], Path], dict[str, Any]]

HOW = """\
Each scope of each case has a process and empty compiler caches of its own. Once the step is compiled,
eager and compiled steps are run in turn (E C C E), and the ratio is the median over the pairs, with the
95% interval of the sign test. A ratio above 1 says that compiled is faster. `compile_s` is all compiling, the
backward included. The callback's other rules are off: no forecast, no lower bound for the gain."""


@dataclass(frozen=True, kw_only=True)
class ScopesSuite:
    """Measures scopes on cases.

    Raises:
        ConfigError: an unknown case, or fewer than 10 pairs.
    """

    cases: Sequence[str]
    quick_cases: Sequence[str]
    scopes: Mapping[str, Mapping[str, Any]]
    """Options of the callback for each scope, by the name that it has in the table."""

    pairs: int = 40
    """Pairs of an eager and a compiled step."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the callback for all scopes."""

    def __post_init__(self) -> None:
        for name in (*self.cases, *self.quick_cases):
            if name not in CASES:
                raise ConfigError(
                    f"cases: {name!r} is unknown: use {', '.join(CASES)}{near_names(str(name), CASES)}."
                )
        if self.pairs < 10:
            raise ConfigError(f"pairs={self.pairs!r} is not allowed: give 10 or more.")

    def chosen(self, case: str | Sequence[str] | None, quick: bool) -> ScopesSuite:
        """The suite with what was asked for: one case, several, ``all``, or None for the suite's own."""
        names = [case] if isinstance(case, str) else case
        names = list(CASES) if names == ["all"] else names
        chosen = list(names or (self.quick_cases if quick else self.cases))
        return ScopesSuite(**{**vars(self), "cases": chosen})

    def run(
        self,
        folder: Path,
        *,
        threads: int = 0,
        command: str = "",
        runner: Runner | None = None,
        console: Console | None = None,
    ) -> list[dict[str, Any]]:
        """Measure what is not in ``folder`` yet, write all results, and return the rows."""
        runner, console = runner or _runner(threads, self.pairs), console or Console()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "scopes.json"
        rows = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
        done = {(row["case"], row["plan"]) for row in rows}
        facts = {**provenance.setting(threads), **provenance.origin(command)}
        for case in self.cases:
            for plan, options in self.scopes.items():
                if (case, plan) in done:
                    continue
                row = {"case": case, "plan": plan, **_measured(runner, case, {**self.options, **options})}
                console.print(_line(row), highlight=False, soft_wrap=True)
                rows.append(row)
                write(folder, rows, facts)
        return rows


def _measured(runner: Runner, case: str, options: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="scopes-") as folder:
        try:
            return runner(case, options, Path(folder))
        except RunFailed as error:
            return {"phase": "failed", "reason": str(error), "speedup": None}


def _runner(threads: int, pairs: int) -> Runner:
    def run(case: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        arguments = [case, "--threads", str(threads), "--pairs", str(pairs), "--options", json.dumps(options)]
        return run_in_process("lightning_hotcompile.bench.one_scope", arguments, folder, threads)

    return run


def _line(row: Mapping[str, Any]) -> str:
    if row.get("speedup") is None:
        return f"{row['case']}, {row['plan']}: {row['phase']}: {row['reason']}"
    ratio = f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['case']}, {row['plan']}: {ratio}, compiled in {row['compile_s']:.1f} s"


def write(folder: Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """JSON, CSV and a Markdown page."""
    unfinished = folder / "scopes.tmp"
    unfinished.write_text(json.dumps({**facts, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / "scopes.json")
    frame(rows).to_csv(folder / "scopes.csv", index=False)
    prior = {**facts, "lines": fitted(rows)}
    (folder / "prior.json").write_text(json.dumps(prior, indent=1) + "\n", encoding="utf-8")
    (folder / "scopes.md").write_text(page(rows, facts), encoding="utf-8")


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each case and scope, the operations as their number only."""
    flat = [{**row, "ops": sum((row.get("ops") or {}).values()), "regions": _kinds(row)} for row in rows]
    return pd.DataFrame(flat)


def _kinds(row: Mapping[str, Any]) -> str:
    kinds = list(row.get("regions") or ())
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def page(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The table of the ratios, one column for each scope, and how they were measured."""
    table = frame(rows)
    wide = table.pivot_table(index="case", columns="plan", values="speedup", sort=False).round(2)
    wide["eager ms"] = table.groupby("case", sort=False)["eager_ms"].median().round(2)
    wide["operations"] = table.groupby("case", sort=False)["ops"].max()
    origin = [
        f"- {name}: {facts[name]}" for name in ("command", "date", "commit", "machine") if facts.get(name)
    ]
    origin.append(f"- versions: {', '.join(f'{k} {v}' for k, v in facts.get('versions', {}).items())}")
    return (
        "\n\n".join(
            [
                "# What each scope gains",
                "Geometric means over the cases that a scope could compile: " + _means(rows) + ".",
                HOW,
                wide.astype(object).fillna("").to_markdown(),
                "## Where this comes from",
                "\n".join(origin),
            ]
        )
        + "\n"
    )


def _means(rows: Sequence[Mapping[str, Any]]) -> str:
    by_plan: dict[str, list[float]] = {}
    best: dict[str, float] = {}
    for row in rows:
        if row.get("speedup") is not None:
            by_plan.setdefault(row["plan"], []).append(row["speedup"])
            best[row["case"]] = max(best.get(row["case"], 1.0), row["speedup"])
    shown = [f"{plan} {geometric_mean(found):.2f}x ({len(found)})" for plan, found in by_plan.items()]
    return ", ".join([*shown, f"the best of each, eager included, {geometric_mean(best.values()) or 1:.2f}x"])
