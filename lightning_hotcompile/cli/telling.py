"""How commands say things: sizes, times, tables, and errors of one line."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table

from lightning_hotcompile.errors import HotCompileError, HotCompileWarning

WIDTH_OF_FILES = 160
"""Columns where the output is no terminal: lines of a file need not fit a window."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class CommandError(HotCompileError):
    """What was asked for on the command line cannot be done."""


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """The body of a command; an error of the package or of the disk ends it with one line and code 2."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HotCompileWarning)
            try:
                yield
            finally:
                for warning in caught:
                    if issubclass(warning.category, HotCompileWarning):
                        note(f"warning: {warning.message}")
    except BrokenPipeError:  # who reads has seen enough (``| head``): typer ends the command in silence
        raise
    except (HotCompileError, OSError) as error:
        note(f"error: {error}")
        raise typer.Exit(2) from None


def note(message: str) -> None:
    """One line on the error stream, whatever the message holds."""
    typer.echo(f"hotcompile: {' '.join(message.split())}", err=True)


def seconds_of(duration: str, option: str) -> float:
    """The seconds of ``30d``, ``12h`` or ``1.5w``.

    Raises:
        CommandError: it is no such duration; the message names the option.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", duration.strip().lower())
    if match is None:
        raise CommandError(
            f"{option}={duration!r} is not allowed: give a number and a unit (s, m, h, d or w), such as 30d."
        )
    return float(match[1]) * _SECONDS[match[2]]


def size_text(n_bytes: int) -> str:
    """Bytes for people: ``"3.4 MB"``."""
    return filesize.decimal(n_bytes)


def time_text(when: float) -> str:
    """Seconds since 1970 as a date and a time of this place, to the minute."""
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M")


def time_json(when: float) -> str:
    """Seconds since 1970 in ISO 8601, in UTC."""
    return datetime.fromtimestamp(when, tz=timezone.utc).isoformat(timespec="seconds")


def count_text(number: int, one: str, many: str | None = None) -> str:
    """``"1 file"``, ``"1,200 files"``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def json_text(data: object) -> str:
    """JSON, with escapes where this output lacks a character of it: that of a file may be cp1252."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(data, indent=2)
    return text


def print_json(data: object) -> None:
    """One JSON document."""
    typer.echo(json_text(data))


def print_table(table: Table) -> None:
    """A table as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    console.print(table)
