"""The rows of a suite: a workload at one size each, written down as lists of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.workloads import catalogue
from lightning_hotcompile.errors import ConfigError, near_names


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration, which gets a process of its own."""

    case: str
    workload: str
    sizes: Mapping[str, Any]
    swept: tuple[str, ...] = ()
    """Names of the sizes in which this row differs from its neighbours."""

    @property
    def key(self) -> str:
        """Its name in tables and files."""
        return " ".join([self.case, *(f"{name}={self.sizes[name]}" for name in self.swept)])


def rows_of(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """All rows; each value that is a list stands for so many rows.

    Args:
        entries: ``case`` and ``workload`` (by default the case's name), all other keys are sizes.

    Raises:
        ConfigError: an entry without a case, an unknown workload or size, or two rows of one name.

    Example:
        >>> [row.key for row in rows_of([{"case": "simple", "batch_size": 8, "width": [16, 32]}])]
        ['simple width=16', 'simple width=32']
    """
    rows = [row for entry in entries for row in _rows(entry)]
    keys = [row.key for row in rows]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"two rows are called {key!r}: give one of them another case.")
    return rows


def _rows(entry: Mapping[str, Any]) -> list[Row]:
    if "case" not in entry:
        raise ConfigError(f"{dict(entry)!r} has no case: give it a name, for example case: mlp.")
    case, workload = entry["case"], entry.get("workload", entry["case"])
    sizes = {name: value for name, value in entry.items() if name not in ("case", "workload")}
    catalogue.check(workload, sizes)
    lists = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in sizes.items()}
    swept = tuple(name for name, value in sizes.items() if isinstance(value, (list, tuple)))
    return [
        Row(case=case, workload=workload, sizes=dict(zip(lists, values, strict=True)), swept=swept)
        for values in itertools.product(*lists.values())
    ]


def names_in(case: object) -> list[str]:
    """What ``case=`` names; empty for all.

    Args:
        case: a name, several, ``all``, or None for all; a number is a name too.

    Example:
        >>> names_in("mlp"), names_in(["mlp", 2]), names_in("all"), names_in(None)
        (['mlp'], ['mlp', '2'], [], [])
    """
    names = list(case) if isinstance(case, (list, tuple)) else [] if case is None else [case]
    return [] if names == ["all"] else [str(name) for name in names]


def cases_in(case: object) -> list[str]:
    """The same for a suite with a selection of its own: all cases that there are for ``all``, empty for None.

    Example:
        >>> cases_in("mlp"), cases_in(None), "gan" in cases_in("all")
        (['mlp'], [], True)
    """
    return list(CASES) if case in ("all", ["all"]) else names_in(case)


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Whether all names that were given for ``what`` (``cases``, say) are known.

    Raises:
        ConfigError: one of them is not; the message says which there are.
    """
    for name in names:
        if name not in known:
            hint = near_names(str(name), known)
            raise ConfigError(f"{what}: {name!r} is unknown: use {', '.join(known)}{hint}.")


def chosen(rows: Sequence[Row], cases: Sequence[str]) -> list[Row]:
    """Those of some cases, or of one name each.

    Raises:
        ConfigError: there is no such case.
    """
    known = list(dict.fromkeys(row.case for row in rows))
    for name in cases:
        if name not in known and name not in {row.key for row in rows}:
            raise ConfigError(
                f"case={name!r} is unknown: use {', '.join(known)}{near_names(str(name), known)}."
            )
    return [row for row in rows if row.case in cases or row.key in cases]
