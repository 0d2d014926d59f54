"""The folder of one measurement: what is finished is in ``regret.json`` at once, and is not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hotcompile.bench.record_file import RecordFile
from lightning_hotcompile.bench.runs import Run


@dataclass(frozen=True, kw_only=True)
class Task:
    """Trainings of one case by one arm in one folder, one after the other: cold, then perhaps warm."""

    case: str
    arm: str
    steps: int
    caches: tuple[str, ...]
    turn: int = 0
    """Equal tasks with different turns are done anew; of their runs the one with the middle time counts."""

    @property
    def key(self) -> Key:
        """What tells it from the others."""
        return self.case, self.arm, self.steps, self.turn

    def __str__(self) -> str:
        return _name(self.key)


Key = tuple[str, str, int, int]


def _name(key: Key) -> str:
    case, arm, steps, turn = key
    return f"{case}: {arm}, {steps} steps{f', turn {turn + 1}' if turn else ''}"


class Results:
    """All that was measured into one folder.

    Args:
        folder: made if it is not there.
        setting: what has to be equal for times to be compared: machine, versions, threads, options.

    Raises:
        OtherResults: there are results of another setting, or the file cannot be read.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any]) -> None:
        self._records = RecordFile(folder / "regret.json", setting)
        self._runs: dict[Key, dict[str, Run]] = {}
        self._failures: dict[Key, str] = {}
        self._read()

    @property
    def file(self) -> Path:
        """Where all is kept."""
        return self._records.file

    @property
    def setting(self) -> dict[str, Any]:
        """What has to be equal."""
        return self._records.setting

    def is_done(self, task: Task) -> bool:
        """Whether all trainings of a task were successful."""
        return set(task.caches) <= set(self._runs.get(task.key, {}))

    def of(self, task: Task) -> dict[str, Run]:
        """The trainings of a task that was successful, by the state of the cache."""
        return self._runs[task.key]

    def add(self, task: Task, runs: Mapping[str, Run]) -> None:
        """A task is finished; ``runs`` by the state of the cache."""
        self._runs[task.key] = dict(runs)
        self._failures.pop(task.key, None)

    def add_failure(self, task: Task, why: str) -> None:
        """A task cannot be done; another run into this folder tries again."""
        self._failures[task.key] = why

    @property
    def cases(self) -> list[str]:
        """Those with a training, in the order of the first ones."""
        return list(dict.fromkeys(case for case, *_ in self._runs))

    def runs(self, case: str) -> dict[tuple[str, int, str], Run]:
        """The trainings of one case by arm, steps and cache; of several turns the one in the middle."""
        turns: dict[tuple[str, int, str], list[Run]] = {}
        for (name, arm, steps, _), by_cache in self._runs.items():
            for cache, run in by_cache.items() if name == case else ():
                turns.setdefault((arm, steps, cache), []).append(run)
        return {key: median(runs) for key, runs in turns.items()}

    @property
    def failures(self) -> list[str]:
        """One sentence for each task that failed."""
        return [f"{_name(key)}: {why}" for key, why in self._failures.items()]

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace the file in one step; ``facts`` go into it for readers and are not read back."""
        tasks = [
            {"task": key, "runs": {cache: asdict(run) for cache, run in by_cache.items()}}
            for key, by_cache in self._runs.items()
        ]
        failures = [{"task": key, "why": why} for key, why in self._failures.items()]
        self._records.write({**facts, "failures": failures, "tasks": tasks})

    def _read(self) -> None:
        content = self._records.read()
        for entry in content.get("tasks", ()):
            runs = {cache: Run.from_dict(run) for cache, run in entry["runs"].items()}
            self._runs[_key(entry["task"])] = runs
        for entry in content.get("failures", ()):
            self._failures[_key(entry["task"])] = entry["why"]


def median(runs: Sequence[Run]) -> Run:
    """The one with the median wall time; of an even number the faster one of the two in the middle."""
    return sorted(runs, key=lambda run: run.wall_s)[(len(runs) - 1) // 2]


def _key(task: Sequence[Any]) -> Key:
    case, arm, steps, *turn = task
    return case, arm, steps, turn[0] if turn else 0
