"""``hotcompile store``: what earlier runs have left on this machine, to look at, to clear and to carry."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lightning_hotcompile.cli.telling import (
    CommandError,
    count_text,
    errors_told,
    note,
    print_json,
    print_table,
    seconds_of,
    size_text,
    time_json,
    time_text,
)

if TYPE_CHECKING:
    from lightning_hotcompile.store.listing import StoreRow
    from lightning_hotcompile.store.placing import Imported
    from lightning_hotcompile.store.store import Store

app = typer.Typer(
    name="store",
    no_args_is_help=True,
    help="What earlier runs have learned. That is: verdicts, compile times and compiled code.",
)

Folder = Annotated[
    Path | None,
    typer.Option(help="The store's folder; without it HOTCOMPILE_STORE, else the user's cache folder."),
]
WithoutCache = Annotated[
    bool, typer.Option("--no-compiler-cache", help="Verdicts and compile times only, no compiled code.")
]

KINDS = {"profile": "verdict", "samples": "compile times", "compiler": "compiled code"}


@app.command("ls")
def list_(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List what is in the store."""
    with errors_told():
        path = _folder_of(folder)
        rows = _rows(_existing(path, asked_for=folder is not None))
        if as_json:
            print_json(_listed(path, rows))
        elif not rows:
            typer.echo(f"The store {path} is empty.")
        else:
            typer.echo(f"Store: {path}")
            print_table(_table(rows))


@app.command()
def clear(
    folder: Folder = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Only what was not used for so long: 30d, 12h, 2w.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget what is in the store. Asks before, and leaves what a run under way may use."""
    with errors_told():
        age = None if older_than is None else seconds_of(older_than, "--older-than")
        path = _folder_of(folder)
        store = _existing(path, asked_for=folder is not None)
        rows = _rows(store)
        if store is None or not rows:
            typer.echo(f"The store {path} is empty: there is nothing to clear.")
            return
        what = "all" if older_than is None else f"what was not used for {older_than}"
        if not yes and not _confirmed(f"Forget {what} of {path} ({size_text(_size(rows))} in all)?"):
            typer.echo("Nothing was removed.")
            raise typer.Exit(1)
        freed = store.clear(older_than=age)
        typer.echo(f"Removed {size_text(freed)} from {path}.")
        _tell_what_stays(store, float("inf") if age is None else time.time() - age)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The archive to write: .tar, or .tar.gz to compress it.")],
    folder: Folder = None,
    no_compiler_cache: WithoutCache = False,
) -> None:
    """Write the store into one archive. Another machine takes it in with 'store import'.

    Compiled code of this machine goes along, for each number of threads and kind of devices that runs had.
    """
    with errors_told():
        _check_target(file)
        path = _folder_of(folder)
        store = _existing(path, asked_for=folder is not None)
        if store is None or not _rows(store):
            raise CommandError(f"the store {path} is empty: there is nothing to write into {file}.")
        done = store.export(file, compiler_cache=not no_compiler_cache)
    typer.echo(f"Wrote {done.path}: {count_text(done.files, 'file')} of {path}, {size_text(done.size)}.")
    if done.left_out:
        typer.echo(
            f"Left out: {size_text(done.left_out)} of compiled code that is not known to be of this machine, "
            "PyTorch and Python: export it where it was compiled, with the same OMP_NUM_THREADS."
        )
    typer.echo(f"SHA-256: {done.sha256}")
    typer.echo("To take it in elsewhere, tell this hash in another way than the archive, and run:")
    typer.echo(f"  hotcompile store import {shlex.quote(done.path.name)} --sha256 {done.sha256}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The archive that 'hotcompile store export' has written.")],
    folder: Folder = None,
    sha256: Annotated[
        str | None, typer.Option(metavar="HEX", help="The hash that the export has told; checked first.")
    ] = None,
    no_compiler_cache: WithoutCache = False,
) -> None:
    """Take in an archive. Nothing is placed before all of it was verified."""
    with errors_told():
        _check_archive(file, sha256)
        path = _folder_of(folder)
        taken = _opened(path).import_(file, compiler_cache=not no_compiler_cache, sha256=sha256)
        _tell_imported(taken, path)
        if taken.compiler_files and sha256 is None:
            note(
                "the archive's hash was not compared (--sha256): compiled code is only as good as its sender."
            )


def _folder_of(given: Path | None) -> Path:
    from lightning_hotcompile.store.folder import default_folder

    return (default_folder() if given is None else given.expanduser()).absolute()


def _opened(folder: Path) -> Store:
    """The store in this folder, made if it is missing.

    Raises:
        CommandError: the folder holds something else, of which nothing may be listed, sent or removed.
        StoreError: it cannot be made or trusted.
    """
    from lightning_hotcompile.store.records import PROFILES, SAMPLES
    from lightning_hotcompile.store.store import Store

    if folder.is_dir() and not all((folder / room).is_dir() for room in (PROFILES, SAMPLES)):
        first = next(folder.iterdir(), None)
        if first is not None:
            raise CommandError(
                f"{folder} is no store: it holds {first.name!r}. Name a store, or a new or empty folder."
            )
    return Store(folder)


def _existing(folder: Path, *, asked_for: bool) -> Store | None:
    """The store in this folder; looking at one that no run has made yet does not make it.

    Raises:
        CommandError: a folder that was asked for is not there.
    """
    if folder.exists() or folder.is_symlink():
        return _opened(folder)
    if asked_for:
        raise CommandError(f"--folder={str(folder)!r} is not there: name the folder of a store.")
    return None


def _rows(store: Store | None) -> list[StoreRow]:
    # Clearing leaves the compiler's empty folders: nobody wants to see them.
    return [] if store is None else [r for r in store.ls() if r.size or r.kind != "compiler"]


def _size(rows: list[StoreRow]) -> int:
    return sum(row.size for row in rows)


def _listed(folder: Path, rows: list[StoreRow]) -> dict[str, Any]:
    entries = [
        {"kind": r.kind, "name": r.name, "bytes": r.size, "used": time_json(r.used), "text": r.text}
        for r in rows
    ]
    return {"folder": str(folder), "bytes": _size(rows), "entries": entries}


def _table(rows: list[StoreRow]) -> Table:
    table = Table(show_footer=True)
    table.add_column("kind", "total", no_wrap=True)
    table.add_column("name", count_text(len(rows), "entry", "entries"), overflow="fold")
    table.add_column("size", size_text(_size(rows)), justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("what", overflow="fold")
    for row in rows:
        # As Text: brackets in names are no markup, and control characters do not reach the terminal.
        cells = (KINDS[row.kind], row.name, size_text(row.size), time_text(row.used), row.text)
        table.add_row(*map(Text, cells))
    return table


def _confirmed(question: str) -> bool:
    """What the user answers.

    Raises:
        CommandError: there is nobody to ask.
    """
    try:
        return typer.confirm(question)
    except typer.Abort:
        raise CommandError("no answer, so nothing was removed: answer y, or give --yes.") from None


def _tell_what_stays(store: Store, before: float) -> None:
    from lightning_hotcompile.store.bounding import entries_of
    from lightning_hotcompile.store.cache_room import COMPILER

    folders = [p for p in (store.folder / COMPILER).glob("*") if p.is_dir() and not p.is_symlink()]
    stay = [entry for folder in folders for entry in entries_of(folder) if entry.used < before]
    if stay:
        size = size_text(sum(entry.size for entry in stay))
        typer.echo(f"{size} of compiled code stays: a run that is under way may use it. Try again after it.")


def _check_target(file: Path) -> None:
    if file.exists():
        raise CommandError(f"{file} is there already: remove it first, or name another file.")
    if not file.absolute().parent.is_dir():
        raise CommandError(f"{file} cannot be written: make the folder {file.absolute().parent} first.")


def _check_archive(file: Path, sha256: str | None) -> None:
    if not file.is_file():
        raise CommandError(f"{file} is no file: name the archive that 'hotcompile store export' has written.")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256.strip()):
        raise CommandError(
            f"--sha256={sha256!r} is not allowed: give the 64 digits that the export has told."
        )


def _tell_imported(taken: Imported, folder: Path) -> None:
    parts = (
        count_text(taken.profiles, "verdict"),
        f"compile times of {count_text(taken.samples, 'machine')}",
        f"{count_text(taken.compiler_files, 'file')} of compiled code",
    )
    typer.echo(f"Took into {folder}: {', '.join(parts)}.")
    for reason in taken.left_out:
        typer.echo(f"Left out: {reason}.")
