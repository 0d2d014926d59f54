"""``hotcompile doctor``: whether this machine can compile, and what to do where it cannot."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lightning_hotcompile.cli.checks import Check, all_checks
from lightning_hotcompile.cli.gathering import facts_of_this_machine
from lightning_hotcompile.cli.telling import count_text, errors_told, print_json, print_table

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def check_machine(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check whether this machine can compile. Exit code 1 if there is a problem, else 0."""
    with errors_told():
        checks = all_checks(facts_of_this_machine())
    if as_json:
        print_json({"checks": [asdict(c) for c in checks], **_counts(checks)})
    else:
        print_table(_table(checks))
        typer.echo(_summary(checks))
    raise typer.Exit(1 if _counts(checks)["problems"] else 0)


def _counts(checks: list[Check]) -> dict[str, int]:
    return {f"{kind}s": sum(c.status == kind for c in checks) for kind in ("problem", "warning")}


def _table(checks: list[Check]) -> Table:
    table = Table(show_lines=any(c.remedy for c in checks))
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        found = f"{check.found}\nTo do: {check.remedy}" if check.remedy else check.found
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), Text(found))
    return table


def _summary(checks: list[Check]) -> str:
    counts = _counts(checks)
    if not any(counts.values()):
        return "No problem found."
    return f"{count_text(counts['problems'], 'problem')}, {count_text(counts['warnings'], 'warning')}."
