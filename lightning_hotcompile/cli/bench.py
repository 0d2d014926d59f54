"""``hotcompile bench``: the recipe that measures, where the recipes are at hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from lightning_hotcompile.cli.launch import run_script
from lightning_hotcompile.cli.telling import CommandError, errors_told

RECIPE = Path("recipes", "benchmark.py")


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="As for the recipe, such as suite=mlp quick=true."),
    ] = None,
) -> None:
    """Run the benchmark recipe of a checkout.

    The same as python recipes/benchmark.py ARGS... there.

    'hotcompile bench -- --help' lists the suites. Exit code 2 if the recipes are not at hand, else that of
    the recipe.
    """
    with errors_told():
        recipe = find_recipe((Path(__file__).parents[2], Path.cwd()))
        code = run_script([sys.executable, str(recipe), *(arguments or ())], os.environ)
    raise typer.Exit(code)


def find_recipe(folders: Iterable[Path]) -> Path:
    """The recipe in the first of these folders that is a checkout.

    Raises:
        CommandError: none of them is.
    """
    for folder in folders:
        recipe = folder / RECIPE
        # Another project may have a file of this name.
        if recipe.is_file() and (folder / "lightning_hotcompile" / "bench").is_dir():
            return recipe
    raise CommandError(
        f"{RECIPE} is not here: it belongs to the source and not to the installed package. Take a checkout "
        "of the project, install it with pip install -e '.[recipes]', and call this from its folder."
    )
