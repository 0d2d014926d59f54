"""The receipt of a run: what was decided, what it cost, what it gained, and what was proven."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

from lightning_hotcompile.receipt.rendering import report_to_markdown, report_to_text
from lightning_hotcompile.receipt.samples import StepSample, json_with_rows
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.watch.stats import Ratio, Summary


@dataclass(frozen=True, kw_only=True)
class PhaseStats:
    """The training steps of one phase."""

    name: str
    steps: int
    median_ms: float | None
    """None where no step of the phase was timed."""

    iqr_ms: float | None
    """Distance of the quartiles."""

    total_s: float
    """Wall time of the phase, compiling included."""


@dataclass(frozen=True, kw_only=True)
class RegionProof:
    """What is known of one planned region: whether its compiled code really ran."""

    name: str
    kind: str
    members: tuple[str, ...]
    """Module or function names that share the compiled code."""

    graphs: int
    """Compiled, each once: of a region with graph breaks or other shapes several."""

    runs: int
    """Calls of compiled code."""

    compile_s: float
    proven: bool
    """Whether compiled code of this region ran."""

    note: str = ""


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer:
    """One optimizer, and torch's fused kernel in place of the loop that it runs by default."""

    name: str
    class_name: str
    kept: bool
    """Whether it was faster and is used."""

    reason: str
    """Why it is not used; empty while it is on trial."""

    loop_ms: float | None
    """Milliseconds of an update by the loop; None where it was not timed."""

    fused_ms: float | None
    speedup: Ratio | None
    """Time of the loop / time of the kernel, of updates alone, paired."""

    runs: int
    """Updates by the kernel."""

    timed_before: str | None = None
    """When an earlier run has timed both, in UTC; None where this one has."""

    @property
    def saves_ms(self) -> float | None:
        """Milliseconds by which each update is shorter."""
        return None if self.loop_ms is None or self.fused_ms is None else self.loop_ms - self.fused_ms


class _Printed:
    """A text that is made when it is first read: printing a plan takes as long as many a training step."""

    def __get__(self, report: Report | None, owner: type[Report]) -> str:
        if report is None:
            raise AttributeError("a report has no plan of its own accord")  # so there is no default
        found = vars(report)["plan"]
        if not isinstance(found, str):
            found = vars(report)["plan"] = str(found)
        return found

    def __set__(self, report: Report, found: object) -> None:
        vars(report)["plan"] = found


def printed_later(plan: object) -> str:
    """For ``Report(plan=...)``: what ``str`` makes of it, once it is asked for."""
    return cast("str", plan)


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """All that a run of the callback has to tell. What was not measured is None or empty, never 0.

    It prints as :meth:`to_text`; a notebook shows :meth:`to_markdown`.

    Example:
        >>> print(hot.report)  # doctest: +SKIP
    """

    phase: str
    reason: str
    """Why the run is in this phase."""

    scope: str
    """What is compiled, and Inductor's mode where that is the callback's choice."""

    plan: str = cast("str", _Printed())
    """The plan as a printed tree."""

    plan_digest: str
    decision: str
    """The forecast in words: why it was compiled, or why not."""

    steps: int
    """Batches seen."""

    ended: bool = False
    """Whether the run is over: no verdict comes any more where there is none yet."""

    compile_s: float
    """Seconds of compiling, backward included."""

    stall_s: float
    """Seconds in which training stood still because of this callback."""

    recompiles: int
    graph_breaks: int | None
    """``None`` where that is not known, as from an event log alone."""

    parity: str
    """What the comparison with eager said, in words."""

    parity_error: float | None = None
    """Largest absolute difference from eager over all graphs that were compared."""

    eager_ms: Summary | None = None
    compiled_ms: Summary | None = None
    speedup: Ratio | None = None
    """Eager time / compiled time, paired."""

    break_even_step: int | None = None
    """Batch at which compiling had paid for itself; beyond ``steps`` it is a forecast."""

    saved_s: float | None = None
    """Seconds saved in the whole run after all costs; negative if time was lost."""

    total_speedup: float | None = None
    """Time of the training steps and of what went by between them, had all been eager, over the time that
    they took: all costs, and the steps before the flip, are in it. Evaluation is not."""

    regions: tuple[RegionProof, ...] = ()
    fused: tuple[FusedOptimizer, ...] = ()
    """Optimizers for which torch's fused kernel was tried."""

    tried: Mapping[str, float] = field(default_factory=dict)
    """Speed-up of each plan that was measured in this run, by name; 1 for one that was taken back."""

    eager_parts: tuple[str, ...] = ()
    """Parts of the plan that are eager again, though right, since the step is faster without them."""

    peak_memory_mb: Mapping[str, float] = field(default_factory=dict)
    """Peak memory in MB: ``until_flip`` and of the ``whole_run``."""

    overhead_us: float | None = None
    """Microseconds that the callback itself adds to a step."""

    wait_share: float | None = None
    """Share of the time, 0 to 1, that went by between the steps, for data above all."""

    phases: tuple[PhaseStats, ...] = ()
    notes: tuple[str, ...] = ()
    """Warnings and remarks, one sentence each."""

    versions: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    """Events as dictionaries, oldest first."""

    samples: tuple[StepSample, ...] = ()
    """Single steps, oldest first; of a long run every second, every fourth and so on."""

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.steps} steps: {headline(self)}>"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __getstate__(self) -> dict[str, Any]:
        """What others can open: the plan is printed first."""
        return {**vars(self), "plan": self.plan}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the headline first. A number that is not finite becomes None."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {"headline": headline(self), **plain}

    def to_json(self) -> str:
        """Indented JSON of :meth:`to_dict`, valid for every reader (no NaN)."""
        return json_with_rows(self.to_dict(), "samples")

    def to_text(self) -> str:
        """For a terminal: 100 columns wide, no colour codes."""
        return report_to_text(self)

    def to_markdown(self) -> str:
        """For a Markdown page or a logger that shows text."""
        return report_to_markdown(self)

    def to_csv(self) -> str:
        """Two columns, ``key`` and ``value``, keys as paths (``regions.0.name``); no events, no samples.

        What was not measured has an empty value, which pandas reads as NaN.
        """
        single = {k: v for k, v in self.to_dict().items() if k not in ("events", "samples")}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("key", "value"))
        writer.writerows(_flat(single))
        return out.getvalue()


# Derived numbers that readers of the JSON should not have to work out again.
_DERIVED: dict[type, tuple[str, ...]] = {Summary: ("iqr",), Ratio: ("verdict",)}


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)] + list(_DERIVED.get(type(value), ()))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        yield path, value
        return
    for key, child in children:
        yield from _flat(child, f"{path}.{key}" if path else str(key))
