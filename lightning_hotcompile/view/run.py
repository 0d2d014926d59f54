"""A run, read from the files that it has written; what cannot be read is told and hides nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hotcompile.errors import HotCompileError, near_names
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.events import event_from_dict, read_events
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.receipt.samples import StepSample
from lightning_hotcompile.view.captured import Captured, captured_from_dict, is_capture
from lightning_hotcompile.view.from_events import last_run, report_from_events
from lightning_hotcompile.view.restoring import report_from_dict

REPORT_FILE = "report.json"
EVENTS_FILE = "events.jsonl"
CAPTURE_FILE = "summary.json"

_MOST_FOLDERS = 2000


class RunError(HotCompileError):
    """A run is not there, or nothing of it can be read."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run; at least one of ``report`` and ``captured`` is there."""

    name: str
    """The folder or file that was asked for."""

    report: Report | None = None
    """The report of a finished run; else what its events tell."""

    events: tuple[Event, ...] = ()
    """The events that the report is about."""

    log: tuple[Event, ...] = ()
    """All events of the log, those of other stages and of earlier runs too."""

    captured: Captured | None = None
    """What ``python -m lightning_hotcompile.trace`` has captured."""

    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each."""

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """Single steps; those on which the profiler looked are noted as ``profiled``."""
        captured = self.captured
        if self.report is None or not self.report.samples:
            return captured.steps if captured is not None else ()
        profiled = {s.step for s in captured.steps if s.note} if captured is not None else set()
        return tuple(_profiled(s) if s.step in profiled else s for s in self.report.samples)


def _profiled(sample: StepSample) -> StepSample:
    """A step that compiled keeps that as its note: it explains its time better."""
    step, start_s, ms, phase, compiled, note = sample
    return StepSample(step, start_s, ms, phase, compiled, "stalled" if note == "stalled" else "profiled")


def load_run(path: Path) -> Run:
    """The run in a folder, or of one of its files: a report, an event log or a capture.

    Raises:
        RunError: the message names the path and says what to give instead.
        OSError: a file cannot be read.
    """
    files = _files_of(path)
    reader = _Reader(str(path))
    for file in files:
        reader.read(file)
    return reader.run()


class _Reader:
    """Puts a run together from its files."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._report: Report | None = None
        self._captured: Captured | None = None
        self._log: list[Event] = []
        self._problems: list[str] = []

    def read(self, file: Path) -> None:
        if file.suffix == ".jsonl":
            self._log, problems = read_events(str(file))
            self._problems += [f"{file}, {problem}" for problem in problems]
            if not self._log and not problems:
                self._problems.append(f"{file} is empty")
            return
        try:
            self._read_json(json.loads(file.read_bytes()))
        except (ValueError, RecursionError) as error:
            self._problems.append(f"{file} cannot be read ({error})")

    def _read_json(self, record: Any) -> None:
        if is_capture(record):
            self._captured, problems = captured_from_dict(record)
        else:
            self._report, problems = report_from_dict(record)
        self._problems += problems

    def run(self) -> Run:
        report, events = self._report, last_run(self._log)
        if report is not None:
            events = self._events_of(report)
        elif events:
            report = report_from_events(events)
        if report is None and self._captured is None:
            first, *more = self._problems
            others = f" ({len(more)} more lines or files cannot be read either)" if more else ""
            raise RunError(
                f"nothing of {self._name!r} can be read: {first}{others}. Name a run's folder, its "
                f"{REPORT_FILE}, or its event log (.jsonl)."
            )
        return Run(
            name=self._name,
            report=report,
            events=tuple(events),
            log=tuple(self._log or events),
            captured=self._captured,
            problems=tuple(self._problems),
        )

    def _events_of(self, report: Report) -> list[Event]:
        found = []
        for number, record in enumerate(report.events, start=1):
            event, problem = event_from_dict(record)
            found += [event] if event is not None else []
            self._problems += [f"event {number} of the report: {problem}"] if problem else []
        return found


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        siblings = (p.name for p in path.parent.iterdir()) if path.parent.is_dir() else ()
        raise RunError(
            f"RUN={str(path)!r} is not there{near_names(path.name, siblings)}: name a folder that a training "
            f"has written, its {REPORT_FILE}, or its event log (.jsonl)."
        )
    if path.is_dir():
        return _files_in(path)
    if path.suffix not in (".json", ".jsonl"):
        raise RunError(
            f"RUN={str(path)!r} is neither a folder nor a .json or .jsonl file: name one of these."
        )
    return [path]


def _files_in(folder: Path) -> list[Path]:
    logs = sorted(folder.glob("*.jsonl"))
    own = [p for p in logs if p.name == EVENTS_FILE] or logs
    files = [folder / name for name in (REPORT_FILE, CAPTURE_FILE) if (folder / name).is_file()]
    if len(own) > 1:
        names = ", ".join(p.name for p in own)
        raise RunError(f"RUN={str(folder)!r} holds several event logs ({names}): name one of these files.")
    if files or own:
        return files + own
    if next(folder.iterdir(), None) is None:
        raise RunError(f"RUN={str(folder)!r} is an empty folder: name one that a training has written.")
    raise RunError(f"RUN={str(folder)!r} holds no {REPORT_FILE} and no event log (.jsonl){_inside(folder)}")


def _inside(folder: Path) -> str:
    """The runs further down: hydra's output folders are nested by date and time."""
    found = sorted({str(p.parent) for p in _some_below(folder) if p.name in (REPORT_FILE, EVENTS_FILE)})
    if not found:
        return ": name a folder that a training has written."
    return f"; there are runs below: {', '.join(found[-3:])}. Name one of them."


def _some_below(folder: Path) -> Iterable[Path]:
    for number, path in enumerate(folder.glob("*/*/*")):
        if number >= _MOST_FOLDERS:
            return
        yield path
    yield from folder.glob("*/*.json*")
