"""A Report made again from its JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_hotcompile.receipt.report import FusedOptimizer, PhaseStats, RegionProof, Report
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.watch.stats import Ratio, Summary


def report_from_dict(record: Mapping[str, Any]) -> tuple[Report, list[str]]:
    """The report that :meth:`Report.to_dict` gave, and a sentence for each row that was left out.

    Fields that this version does not know are passed over, and those that it has and the record lacks get
    their default. A row of a list (a region, a phase, a sample) that cannot be read is left out.

    Raises:
        ValueError: it is no report: a field without a default is absent, or a value is of another type.
    """
    problems: list[str] = []
    return restored(Report, record, problems), problems


def restored(cls: type[Any], record: object, problems: list[str]) -> Any:
    """A record of this dataclass from plain JSON types; adds to ``problems`` what was left out.

    Raises:
        ValueError: a field without a default is absent, or a value is of another type.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"{cls.__name__} is {_kind_of(record)}, not an object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name not in record:
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__} lacks {field.name!r}")
            continue
        try:
            values[field.name] = _READERS[str(field.type)](record[field.name], problems)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}.{field.name}: {error}") from None
    return cls(**values)


def _plain(*allowed: type) -> Callable[[object, list[str]], Any]:
    def read(value: object, problems: list[str]) -> Any:
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{_kind_of(value)} where {' or '.join(t.__name__ for t in allowed)} is due")
        return value

    return read


def _number(value: object, problems: list[str]) -> float:
    """What was not finite was written as null."""
    return math.nan if value is None else float(_plain(int, float)(value, problems))


def _optional(read: Callable[[object, list[str]], Any]) -> Callable[[object, list[str]], Any]:
    return lambda value, problems: None if value is None else read(value, problems)


def _one(cls: type[Any]) -> Callable[[object, list[str]], Any]:
    return lambda value, problems: None if value is None else restored(cls, value, problems)


def _rows(what: str, read: Callable[[object, list[str]], Any]) -> Callable[[object, list[str]], Any]:
    def read_all(value: object, problems: list[str]) -> tuple[Any, ...]:
        found = []
        for number, row in enumerate(_plain(list, tuple)(value, problems), start=1):
            try:
                found.append(read(row, problems))
            except ValueError as error:
                problems.append(f"{what} {number} of the report is left out: {error}")
        return tuple(found)

    return read_all


def _mapping(read: Callable[[object, list[str]], Any]) -> Callable[[object, list[str]], Any]:
    return lambda value, problems: {
        str(name): read(item, problems) for name, item in _plain(dict)(value, problems).items()
    }


def _sample(value: object, problems: list[str]) -> StepSample:
    row = _plain(list, tuple)(value, problems)
    types: tuple[Any, ...] = (int, (int, float), (int, float), str, bool, str)
    if len(row) not in (5, 6) or not all(isinstance(x, t) for x, t in zip(row, types, strict=False)):
        raise ValueError(f"{row!r} is not [step, start_s, ms, phase, compiled, note]")
    if not all(abs(x) < _LARGEST for x in row[:3]):
        raise ValueError(f"{row!r} holds a number that is not finite")
    return StepSample(*row)


def _kind_of(value: object) -> str:
    return "null" if value is None else type(value).__name__


_LARGEST = 1e15  # of any step or time; beyond it a float does not tell neighbours apart

_text = _plain(str)

_READERS: dict[str, Callable[[object, list[str]], Any]] = {
    "str": _text,
    "int": _plain(int),
    "bool": _plain(bool),
    "float": _number,
    "int | None": _plain(int, type(None)),
    "float | None": _optional(_number),
    "str | None": _optional(_text),
    "Summary | None": _one(Summary),
    "Ratio | None": _one(Ratio),
    "tuple[str, ...]": _rows("text", _text),
    "tuple[RegionProof, ...]": _rows("region", lambda v, p: restored(RegionProof, v, p)),
    "tuple[FusedOptimizer, ...]": _rows("optimizer", lambda v, p: restored(FusedOptimizer, v, p)),
    "tuple[PhaseStats, ...]": _rows("phase", lambda v, p: restored(PhaseStats, v, p)),
    "tuple[Mapping[str, Any], ...]": _rows("event", _plain(dict)),
    "tuple[StepSample, ...]": _rows("sample", _sample),
    "Mapping[str, float]": _mapping(_number),
    "Mapping[str, str]": _mapping(_text),
}
"""How each type of field is read; by annotation, which is a string there."""
