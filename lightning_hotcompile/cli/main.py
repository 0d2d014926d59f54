"""Puts the command ``hotcompile`` together.

A group of commands is a file of its own. It imports torch, and whatever does so, inside of its commands:
``hotcompile --help`` and a wrong option are answered at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from lightning_hotcompile.cli import doctor, launch, run_commands, store
from lightning_hotcompile.cli.bench import bench
from lightning_hotcompile.cli.explain import explain
from lightning_hotcompile.cli.worth import worth
from lightning_hotcompile.version import __version__

app = typer.Typer(
    name="hotcompile",
    no_args_is_help=True,
    add_completion=False,
    # Plain help, and errors of one line: scripts read them too.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(store.app)
app.command("doctor")(doctor.check_machine)
app.command("explain", context_settings=launch.SETTINGS)(explain)
app.command("worth", context_settings=launch.SETTINGS)(worth)
run_commands.add_to(app)
# Options that it does not know are the recipe's, wherever they stand.
app.command("bench", context_settings={**launch.SETTINGS, "ignore_unknown_options": True})(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightning-hotcompile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Whether compiling pays for a script, what runs have left and learned, and a check of this machine."""


def main() -> None:
    """Run the command of this process's arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every encoding of a file or pipe has the lines of trees and rules. (Python's stderr escapes.)
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="hotcompile")
