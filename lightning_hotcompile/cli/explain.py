"""``hotcompile explain``: what would be compiled, and where Dynamo breaks the graph, without training."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lightning_hotcompile.cli.launch import NO_TRAINER, ScriptCommand, run_beside, script_command
from lightning_hotcompile.cli.telling import (
    CommandError,
    count_text,
    errors_told,
    note,
    print_json,
    print_table,
)
from lightning_hotcompile.config import SCOPES
from lightning_hotcompile.switch import SWITCH

if TYPE_CHECKING:
    from lightning_hotcompile.capture.explanation import Explanation
    from lightning_hotcompile.swap.tracing.breaks import GraphBreak

_WIDTH = 100


def explain(
    command: ScriptCommand,
    scope: Annotated[
        str | None, typer.Option(help="Explain this scope instead of the script's own or 'auto'.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide what the script prints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what would be compiled, and graph breaks.

    The script runs up to its first batch, whose forward goes through torch's Dynamo (with manual
    optimization the whole training_step, in which no optimizer changes anything). Then it ends with exit
    code 0. Nothing is trained or compiled, no sanity check runs, no checkpoint is written, and what the
    script does after fit is not run.

    What remains: whatever the script does before its first batch. It reads its data, and its loggers make
    their folders (wandb is disabled). Callbacks see the end as an exception (on_exception).

    A HotCompile in the script's code gives its options, HOTCOMPILE_SCOPE and HOTCOMPILE_KEEP_EAGER those of
    a script without one. Exit code 2 if the script never trains with Lightning; that of the script if it
    fails.
    """
    with errors_told():
        check_scope(scope)
        found, code = _explained(command, scope, quiet=quiet, as_json=as_json)
        if as_json:
            print_json(dataclasses.asdict(found))
        else:
            _print(found)
    if found.failed is not None:
        note(f"error: the script failed in its first batch: {found.failed}")
        raise typer.Exit(code or 1)


def check_scope(scope: str | None) -> None:
    """Refuse a scope that a command line cannot give.

    Raises:
        CommandError: it is unknown, or needs targets.
    """
    if scope == "pattern":
        raise CommandError("--scope='pattern' needs targets: give both to a HotCompile in the script's code.")
    if scope is not None and scope not in SCOPES:
        allowed = [s for s in SCOPES if s != "pattern"]
        raise CommandError(
            f"--scope={scope!r} is not allowed: use {', '.join(allowed[:-1])} or {allowed[-1]}."
        )


def _explained(
    command: list[str], scope: str | None, *, quiet: bool, as_json: bool
) -> tuple[Explanation, int]:
    """What was found, and the script's exit code."""
    from lightning_hotcompile.capture.explanation import explanation_from
    from lightning_hotcompile.capture.order import EXPLANATION_FILE, ExplainOrder

    with tempfile.TemporaryDirectory(prefix="hotcompile-explain-") as folder:
        order = ExplainOrder(folder=folder, scope=scope)
        environment = _environment(os.environ, order.to_text())
        code = run_beside(script_command(command), environment, quiet=quiet, as_json=as_json)
        file = Path(folder, EXPLANATION_FILE)
        if file.is_file():
            return explanation_from(file.read_text(encoding="utf-8")), code
    if code:
        note(f"error: the script failed with exit code {code} before its first batch")
        raise typer.Exit(code)
    raise CommandError(f"there is nothing to explain: {NO_TRAINER}.")


def _environment(own: Mapping[str, str], order: str) -> dict[str, str]:
    from lightning_hotcompile.capture.order import EXPLAIN_VARIABLE

    environment = {"WANDB_MODE": "disabled", **own, EXPLAIN_VARIABLE: order}
    environment.pop(SWITCH, None)  # HOTCOMPILE=off would be a reason to compile nothing
    return environment


def _print(found: Explanation) -> None:
    typer.echo(found.plan or f"no plan for {found.model}")
    if found.declined is not None:
        typer.echo(_folded(f"\nNothing would be compiled: {found.declined}"))
    elif not found.regions and not found.looked:
        typer.echo("\nThere is nothing to compile.")
    if found.forecast is not None and found.declined is None:
        typer.echo(_folded(f"\nForecast: {found.forecast}."))
    if not found.looked:
        return
    typer.echo("\nThe first batch as Dynamo sees it:")
    print_table(_table(found))
    if not found.breaks:
        typer.echo("No graph breaks.")
    else:
        typer.echo(f"{count_text(len(found.breaks), 'graph break')}:")
    for number, graph_break in enumerate(found.breaks, start=1):
        typer.echo(_break_text(number, graph_break))
    for error in found.errors:
        typer.echo(_folded(f"Not compiled: {error}"))


def _table(found: Explanation) -> Table:
    table = Table()
    for name in ("region", "kind", "modules", "calls", "graphs", "operations"):
        table.add_column(name, justify="right" if name in ("calls", "graphs", "operations") else "left")
    table.add_column("remark", overflow="fold")
    for region in found.regions:
        modules = str(len(region.members)) if region.kind == "group" else ""
        counts = [f"{n:,}" for n in (region.calls, len(region.graphs), sum(region.graphs))]
        seen = counts if region.calls else [""] * len(counts)
        table.add_row(Text(region.name), region.kind, modules, *seen, Text(region.error or ""))
    return table


def _break_text(number: int, found: GraphBreak) -> str:
    lines = [f"{number}. {found.place}: {found.consequence}"]
    lines += [f"   > {found.code}"] if found.code else []
    lines += [
        _folded(text, "   ") for text in (found.explanation, *(f"Hint: {h}" for h in found.hints)) if text
    ]
    return "\n".join(lines)


def _folded(text: str, indent: str = "") -> str:
    return "\n".join(
        textwrap.fill(line, _WIDTH, initial_indent=indent, subsequent_indent=indent)
        for line in text.split("\n")
    )
