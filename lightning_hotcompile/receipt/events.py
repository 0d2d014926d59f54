"""What happened, as JSON lines, and read back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, BinaryIO

from lightning_hotcompile.errors import warn
from lightning_hotcompile.receipt.event_kinds import Event

_LINE_LIMIT = 200


class EventLog:
    """Appends events to a file, each as one JSON line.

    The file and its folder are made at the first event. A file that cannot be written gives one
    :class:`~lightning_hotcompile.errors.HotCompileWarning`; nothing is written from then on. A copy
    (pickle, deepcopy) has the path, not the open file.

    Args:
        path: the file, or None to write nothing.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self.path = None if path is None else fspath(path)
        self._file: BinaryIO | None = None
        self._unwritable = False

    def emit(self, event: Event) -> None:
        """Write the event out before returning; never raises for the file's sake."""
        if self.path is not None:
            self._write(_to_line(event))

    def open(self) -> None:
        """Make the file, so that it is there even if nothing happens."""
        self._write(b"")

    def _write(self, line: bytes) -> None:
        if self.path is None or self._unwritable:
            return
        try:
            if self._file is None:
                self._file = _open_at_line_start(self.path)
            self._file.write(line)
            self._file.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._unwritable:
            return  # closing a full disk's file fails once more
        self._unwritable = True
        self.close()
        warn(
            f"event_log={self.path!r} cannot be written ({error}): events are kept in memory only. "
            "Give the path of a file that this process may write, or None.",
            stacklevel=3,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def read_events(path: str) -> tuple[list[Event], list[str]]:
    """Read an event log; a line that cannot be read never hides the others.

    Returns:
        The events in the file's order, and one sentence with the line number for each line that
        is not JSON, of an unknown kind, or lacks a field, and for each field that is not known.

    Raises:
        OSError: the file is not there or cannot be read.
    """
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    events, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            event, problem = _from_line(line)
            events += [event] if event is not None else []
            problems += [f"line {number}: {problem}"] if problem else []
    return events, problems


def describe(event: Event) -> str:
    """One readable line.

    >>> describe(Compiled(step=10, region="blocks", seconds=3.5, n_ops=120, cache_hit=False))
    'step     10  COMPILED       blocks in 3.50 s, 120 ops, not in the cache'
    """
    words = textwrap.shorten(str(event), width=_LINE_LIMIT, placeholder=" ...")
    return f"step {event.step:>6}  {event.kind.upper():<14}  {words}".rstrip()


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON types, its kind first; a number that is not finite becomes None."""
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    return {"kind": event.kind, **finite}


def event_from_dict(record: Mapping[str, Any]) -> tuple[Event | None, str]:
    """The event of such a dictionary, or None, and what is wrong with the dictionary; empty if nothing is."""
    fields = dict(record)
    cls = _KINDS.get(str(fields.pop("kind", None)))
    if cls is None:
        return None, "has no known kind; it may come from a newer version"
    return _from_record(cls, fields)


_KINDS: dict[str, type[Event]] = {cls.kind_name(): cls for cls in Event.__subclasses__()}

# By annotation, which is a string there; a float field takes null too, because NaN is written as null.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float, type(None)),
    "float | None": (int, float, type(None)),
    "str": (str,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
}


def _to_line(event: Event) -> bytes:
    return json.dumps(event_to_dict(event), default=str).encode() + b"\n"


def _open_at_line_start(path: str) -> BinaryIO:
    """Open for appending, and end a line that a crash left unfinished: it would spoil the next one."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    unfinished = os.path.isfile(path) and not _ends_with_newline(path)
    file = open(path, "ab")  # noqa: SIM115 (kept open between events)
    if unfinished:
        file.write(b"\n")
    return file


def _ends_with_newline(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 1))
        return file.read(1) in (b"", b"\n")


def _from_line(line: bytes) -> tuple[Event | None, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"is not JSON ({error})"
    if not isinstance(record, dict):
        return None, f"is {type(record).__name__}, not an event"
    return event_from_dict(record)


def _from_record(cls: type[Event], record: dict[str, Any]) -> tuple[Event | None, str]:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in record and f.default is not dataclasses.MISSING:
            continue  # written by a version that did not have it yet
        if f.name not in record:
            return None, f"{cls.__name__} lacks {f.name!r}"
        value = record.pop(f.name)
        allowed = _JSON_TYPES[str(f.type)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            return None, f"{cls.__name__} has {f.name}={value!r}, which is not of type {f.type}"
        values[f.name] = math.nan if f.type == "float" and value is None else value
    unknown = f"{cls.__name__} has fields that are not known: {', '.join(sorted(record))}" if record else ""
    return cls(**values), unknown
