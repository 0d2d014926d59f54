"""Records that come from a file: every field is checked, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple


class InvalidRecord(ValueError):
    """A record has a field that is missing, unknown or not allowed."""


class NewerFormat(ValueError):
    """A file was written in a format that this version does not know yet."""


class Rule(NamedTuple):
    """What a field may hold: a test, and the same in words."""

    allows: Callable[[Any], bool]
    words: str


def line(most: int = 200, *, least: int = 0) -> Rule:
    """Printable text on one line: nothing in it that would move a terminal's cursor."""
    return Rule(
        lambda v: isinstance(v, str) and least <= len(v) <= most and v.isprintable(),
        f"{least} to {most} printable characters",
    )


def printable(value: str, most: int) -> str:
    """At most ``most`` characters of a text; control characters but for line ends and tabs as ``?``."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value[:most])


def number(least: float, most: float) -> Rule:
    """A finite number in a range, not a bool."""

    def allows(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return least <= value <= most and math.isfinite(value)

    return Rule(allows, f"a number from {least:g} to {most:g}")


def whole(least: int, most: int) -> Rule:
    """A whole number in a range, not a bool."""
    return Rule(lambda v: type(v) is int and least <= v <= most, f"a whole number from {least} to {most}")


def flag() -> Rule:
    """True or false."""
    return Rule(lambda v: isinstance(v, bool), "true or false")


def one_of(*values: str) -> Rule:
    """One of these strings."""
    return Rule(lambda v: isinstance(v, str) and v in values, f"one of {', '.join(values)}")


def many(rule: Rule, most: int) -> Rule:
    """A tuple of at most ``most`` values that each follow ``rule``."""
    return Rule(
        lambda v: isinstance(v, tuple) and len(v) <= most and all(map(rule.allows, v)),
        f"at most {most} times {rule.words}",
    )


def maybe(rule: Rule) -> Rule:
    """``None``, or what follows ``rule``."""
    return Rule(lambda v: v is None or rule.allows(v), f"nothing or {rule.words}")


def already(clean: Callable[[str], str]) -> Rule:
    """A string that ``clean`` would leave as it is."""
    return Rule(lambda v: isinstance(v, str) and clean(v) == v, "printable text, not too long")


def of_type(kind: type) -> Rule:
    """An instance of a class that has checked itself."""
    return Rule(lambda v: isinstance(v, kind), f"a {kind.__name__}")


def _is_utc_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except ValueError:
        return False


def utc_time() -> Rule:
    """A moment in ISO 8601 with the offset of UTC, such as ``2026-01-31T12:00:00+00:00``."""
    return Rule(_is_utc_time, "a time like 2026-01-31T12:00:00+00:00")


def check(record: Any, rules: Mapping[str, Rule]) -> None:
    """Refuse a dataclass of which one field is not allowed.

    Raises:
        InvalidRecord: with the field, its value and what is allowed.
    """
    for name, rule in rules.items():
        value = getattr(record, name)
        if not rule.allows(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            raise InvalidRecord(f"{type(record).__name__}.{name} is {shown}, allowed is {rule.words}")


def exact_fields(data: object, kind: type) -> dict[str, Any]:
    """The fields of a dataclass, each present and no other.

    Raises:
        InvalidRecord: ``data`` is no mapping, or has other fields.
    """
    if not isinstance(data, Mapping):
        raise InvalidRecord(f"a {kind.__name__} is expected, not a {type(data).__name__}")
    names = {f.name for f in dataclasses.fields(kind)}
    if set(data) != names:
        odd = ", ".join(sorted(map(str, set(data) ^ names)))[:200]
        raise InvalidRecord(f"{kind.__name__} has missing or unknown fields: {odd}")
    return dict(data)


def wrap(record: object, *, kind: str, version: int) -> bytes:
    """A record as the bytes of its file, with kind and format version."""
    document = {"kind": kind, "format": version, "record": record}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def unwrap(data: bytes, *, kind: str, version: int) -> Any:
    """The record in the bytes of a file.

    Raises:
        InvalidRecord: these bytes are no file of this kind.
        NewerFormat: a later version of the package wrote them.
    """
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"it cannot be read as JSON ({str(error)[:120]})") from None
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise InvalidRecord(f"it is no file of the kind {kind!r}")
    found = document.get("format")
    if type(found) is int and found > version:
        raise NewerFormat(f"it has format {found}, this version knows formats up to {version}")
    if type(found) is not int or found != version or set(document) != {"kind", "format", "record"}:
        raise InvalidRecord(f"its format is {found!r:.40}, expected is {version}")
    return document["record"]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
