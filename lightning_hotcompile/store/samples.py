"""What compiling has cost on this machine: the forecast's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hotcompile.store import checked
from lightning_hotcompile.store.checked import InvalidRecord

FORMAT = 4
KIND = "hotcompile compile costs"
MOST_SAMPLES = 200
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class CompileSample:
    """One compile with an empty cache, and what it took.

    Args:
        assumed_s: seconds that were assumed for it, with the constants of the forecast.
        seconds: wall time of compiling.
        by_child: whether a child process compiled while training went on.
        when: UTC in ISO 8601.
        backend: that compiled: how fast one is says nothing about another.

    Raises:
        InvalidRecord: a field has a wrong type or is out of range.
    """

    assumed_s: float
    seconds: float
    by_child: bool
    when: str
    backend: str = "inductor"

    def __post_init__(self) -> None:
        checked.check(self, _RULES)

    @classmethod
    def from_dict(cls, data: object) -> CompileSample:
        """Read what ``dataclasses.asdict`` gave.

        Raises:
            InvalidRecord: fields are missing, unknown or not allowed.
        """
        return cls(**checked.exact_fields(data, cls))


_RULES = {
    "assumed_s": checked.number(0, 1e7),
    "seconds": checked.number(0, 1e7),
    "by_child": checked.flag(),
    "when": checked.utc_time(),
    "backend": checked.line(least=1),
}


def to_bytes(samples: Iterable[CompileSample]) -> bytes:
    """The content of the file of samples: the last 200 of them."""
    kept = list(samples)[-MOST_SAMPLES:]
    return checked.wrap([dataclasses.asdict(s) for s in kept], kind=KIND, version=FORMAT)


def from_bytes(data: bytes) -> tuple[CompileSample, ...]:
    """Read the content of a file of samples, oldest first.

    Raises:
        InvalidRecord: it is no valid file of samples.
        NewerFormat: a later version of the package wrote it.
    """
    record = checked.unwrap(data, kind=KIND, version=FORMAT)
    if not isinstance(record, list) or len(record) > MOST_SAMPLES:
        raise InvalidRecord(f"a list of at most {MOST_SAMPLES} samples is expected")
    return tuple(map(CompileSample.from_dict, record))
