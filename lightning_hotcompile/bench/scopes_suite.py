"""The suite ``scopes``: what each scope gains on each case, and the prior that the forecast takes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from lightning_hotcompile.bench.case_suite import CaseSuite, origin
from lightning_hotcompile.bench.kept_rows import Row, failures
from lightning_hotcompile.bench.prior_fit import fitted
from lightning_hotcompile.bench.regret import geometric_mean
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.plan.prior import OpStatistics

_OF_A_MACHINE = ("machine", "versions", "commit", "command", "date")

FUSED = "+fused"
"""End of the name of a scope that is measured with torch's fused optimizers, in the eager steps too."""

HOW = """\
Each scope of each case has a process and empty compiler caches of its own. Once the step is compiled,
eager and compiled steps take turns in an order without a period, and the ratio is the Hodges-Lehmann estimate
over the pairs, with the 98% interval of the sign test. A ratio above 1 says that compiled is faster.
`compile_s` is all compiling, the backward included. The callback's other rules are off: no forecast, no lower
bound for the gain. Operations are those of the forward and the backward; fusible are all but views and calls
of a library (matrix products, convolutions, recurrent layers, attention, embeddings). Light are those of the
fusible ones that do little for each element (arithmetic, copies, sums; no activations, normalisations or
random numbers): the share of the eager step that they take, timed one by one in the fastest of four early
steps, and 3 us more for each: what surrounds it is saved with it. With `+fused` torch's fused kernels update
the weights, in eager and in compiled steps, as they do with the callback's usual options."""


@dataclass(frozen=True, kw_only=True)
class ScopesSuite(CaseSuite):
    """Measures scopes on cases.

    Raises:
        ConfigError: an unknown case, fewer than 10 pairs, or a file that is not there.
    """

    name = "scopes"
    how_much = ("pairs",)

    scopes: Mapping[str, Mapping[str, Any]]
    """Options of the callback for each scope, by the name that it has in the table."""

    pairs: int = 40
    """Pairs of an eager and a compiled step."""

    also: Sequence[str] = ()
    """Results of this suite, of other machines say, to which the prior is fitted as well: JSON files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for file in self.also:
            if not Path(file).is_file():
                raise ConfigError(f"also: there is no file {file!r}: give a scopes.json of another run.")
        self._at_least(pairs=10)

    @property
    def ways(self) -> Mapping[str, Mapping[str, Any]]:
        """The scopes."""
        return self.scopes

    def arguments(self, case: str, plan: str) -> tuple[str, list[str]]:
        """The module that measures a row, and what it is told."""
        fused = ["--fused"] if plan.endswith(FUSED) else []
        return "lightning_hotcompile.bench.one_scope", [case, "--pairs", str(self.pairs), *fused]

    def line(self, row: Row) -> str:
        """A row for the console."""
        if row.get("speedup") is None:
            return f"{row['case']}, {row['plan']}: {row['phase']}: {row['reason']}"
        ratio = f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"
        return f"{row['case']}, {row['plan']}: {ratio}, compiled in {row['compile_s']:.1f} s"

    def files(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, str]:
        """The table, the page and the prior."""
        others = [json.loads(Path(file).read_text("utf-8")) for file in self.also]
        machines = [{name: each.get(name) for name in _OF_A_MACHINE} for each in (facts, *others)]
        gains = fitted([*rows, *(row for other in others for row in other["rows"])])
        prior = {"measured": machines, "gains": gains}
        return {**super().files(rows, facts), "prior.json": json.dumps(prior, indent=1) + "\n"}

    def frame(self, rows: Sequence[Row]) -> pd.DataFrame:
        """One row for each case and scope; of the operations how many, and what the prior is fitted to."""
        return pd.DataFrame([_flat(row) for row in rows])

    def page(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
        """The table of the ratios, one column for each scope, and how they were measured."""
        parts = [
            "# What each scope gains",
            "Geometric means over the cases that a scope could compile: " + _means(rows) + ".",
            HOW,
            self._table(rows),
            *failures(rows),
            "## Where this comes from",
            origin(facts),
        ]
        return "\n\n".join(parts) + "\n"

    def _table(self, rows: Sequence[Row]) -> str:
        """A row for each case that was compiled in one scope at least."""
        if all(row.get("speedup") is None for row in rows):
            return "Nothing is measured yet."
        table = self.frame(rows)
        wide = table.pivot_table(index="case", columns="plan", values="speedup", sort=False).round(2)
        wide["eager ms"] = table.groupby("case", sort=False)["eager_ms"].median().round(2)
        wide["operations"] = table.groupby("case", sort=False)["ops"].max()
        wide["fusible"] = table.groupby("case", sort=False)["fusible"].max()
        wide["light"] = table.groupby("case", sort=False)["light_share"].median().round(2)
        return str(wide.astype(object).fillna("").to_markdown())


def _flat(row: Row) -> dict[str, Any]:
    ops, elements = row.get("ops") or {}, row.get("elements") or {}
    found = {**row, "ops": sum(ops.values()), "regions": _kinds(row)}
    for each in ("elements", "seconds"):
        found.pop(each, None)
    statistics = OpStatistics.of(ops, elements, row.get("seconds"))
    share = statistics.light_share(1e-3 * (row.get("eager_ms") or 0.0))
    return {**found, **asdict(statistics), "light_share": share}


def _kinds(row: Row) -> str:
    kinds = list(row.get("regions") or ())
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _means(rows: Sequence[Row]) -> str:
    by_plan: dict[str, list[float]] = {}
    best: dict[str, float] = {}
    for row in rows:
        if row.get("speedup") is not None:
            by_plan.setdefault(row["plan"], []).append(row["speedup"])
            best[row["case"]] = max(best.get(row["case"], 1.0), row["speedup"])
    shown = [f"{plan} {geometric_mean(found):.2f}x ({len(found)})" for plan, found in by_plan.items()]
    return ", ".join([*shown, f"the best of each, eager included, {geometric_mean(best.values()) or 1:.2f}x"])
