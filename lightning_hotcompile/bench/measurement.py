"""What one process measures: for each arm its samples, what it cost, and whether it is to be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, INVALID, OOM, SKIPPED, ERROR, TIMEOUT = "ok", "INVALID", "OOM", "SKIPPED", "ERROR", "TIMEOUT"

FINDINGS = (OK, INVALID, OOM)
"""What a second try would not change; rows that ended otherwise are tried again."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One configuration, for a process of its own."""

    workload: str
    sizes: Mapping[str, Any]
    device: str = "cpu"
    warmup: int = 10
    """Steps of each arm before those that count, the one that compiles included."""

    rounds: int = 100
    """Steps of each arm that count."""

    seconds: float = 20.0
    """After so long no more rounds are run, once there are 10."""

    backend: str = "inductor"
    only: str = ""
    """``eager`` or ``compiled``: those arms alone, where all together are too large."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)


@dataclass(kw_only=True)
class ArmResult:
    """One arm. A status other than ``ok`` has a reason, and its times are not to be used."""

    compiled: bool
    status: str = OK
    reason: str = ""
    laps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each part of each step: ``forward``, ``backward``, ``optimizer``."""

    warmup_s: float = 0.0
    """Compiling, and the steps before those that count; without the comparison with eager."""

    compile_s: float = 0.0
    """Time in the compiler, the backward's included."""

    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    compiled_ops: int = 0
    """Operations in the graphs."""

    runs_per_step: int = 0
    """How often compiled code ran in each step that counts."""

    parity: str = NOT_MEASURED
    parity_error: float | None = None
    peak_memory_mb: float | None = None
    """On the CPU of one step on top of what was there before, on a GPU of all that is allocated."""

    extra: dict[str, float] = field(default_factory=dict)
    """Further columns."""


@dataclass(kw_only=True)
class Measurement:
    """All arms of one configuration."""

    arms: dict[str, ArmResult]
    note: str = ""
    parameters: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """Further columns of all arms."""

    paired: bool = True
    """Whether the i-th samples of all arms were taken one after the other."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Read what :meth:`to_dict` gave, also after a way through JSON."""
        return cls(**{**data, "arms": {name: ArmResult(**arm) for name, arm in data["arms"].items()}})

    def joined(self, other: Measurement) -> Measurement:
        """The arms of two processes: their times were not taken in turns."""
        notes = dict.fromkeys(n for n in (self.note, other.note, "arms in processes of their own") if n)
        return Measurement(
            arms={**self.arms, **other.arms},
            note="; ".join(notes),
            parameters=self.parameters or other.parameters,
            facts={**self.facts, **other.facts},
            paired=False,
        )
