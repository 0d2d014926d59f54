"""The suite ``regret``: which trainings it needs, in which order, and what it writes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from lightning_hotcompile.bench import provenance, tables
from lightning_hotcompile.bench.arms import ARMS, HOTCOMPILE, UNCOMPILED, USUAL
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.other_ways import (
    COLD,
    PREPARED,
    STATES,
    STATES_OF_OTHERS,
    again,
    arm_of,
    is_compiled,
)
from lightning_hotcompile.bench.prepared import PreparedFolder, Runner
from lightning_hotcompile.bench.process_runner import ProcessRunner
from lightning_hotcompile.bench.progress import progress_bar
from lightning_hotcompile.bench.regret import Cell, cells_of, drift
from lightning_hotcompile.bench.results import Results, Task
from lightning_hotcompile.bench.rows import cases_in, check_names
from lightning_hotcompile.bench.runs import Run, RunFailed
from lightning_hotcompile.errors import ConfigError

_T = TypeVar("_T")

_START_S, _COMPILE_S, _WARM_S, _STEP_S = 0.5, 20.0, 3.0, 0.005
"""What a process, a compile, a compile from the cache and a step take, to tell how long is left."""


@dataclass(frozen=True, kw_only=True)
class RegretSuite:
    """Measures regret over cases and lengths.

    Raises:
        ConfigError: an unknown case or arm, or a length below 1.
    """

    cases: Sequence[str]
    lengths: Sequence[int]
    """Steps of a training."""

    most_steps: Mapping[str, int] = field(default_factory=dict)
    """By case: steps of its longest training, where all of the lengths would take too long."""

    quick_cases: Sequence[str]
    quick_lengths: Sequence[int]
    """The same for ``quick=true``."""

    arms: Sequence[str] = USUAL
    probe_steps: int = 96
    """Steps of a compiled arm from which its longer trainings are estimated: six cycles of the batches."""

    turns: int = 3
    """Trainings of the callback, each between two of eager, at lengths up to ``turns_up_to``; else one."""

    turns_up_to: int = 50
    """Steps; the time of one short training is a matter of luck."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the callback."""

    def __post_init__(self) -> None:
        check_names("cases", [*self.cases, *self.quick_cases, *self.most_steps], CASES)
        check_names("arms", self.arms, ARMS)
        for steps in (*self.lengths, *self.quick_lengths, *self.most_steps.values(), self.probe_steps):
            _whole("a length", steps, 1)
        _whole("turns", self.turns, 1)
        _whole("turns_up_to", self.turns_up_to, 0)
        if not self.lengths or not self.quick_lengths:
            raise ConfigError("no length is left: give one or more, for example suite.lengths=[500].")

    def chosen(self, case: object, quick: bool) -> RegretSuite:
        """The suite with what was asked for as its cases and lengths.

        Args:
            case: one name, several, ``all``, or None for the suite's own.
            quick: a few cases, and fewer lengths.
        """
        return dataclasses.replace(
            self,
            cases=cases_in(case) or list(self.quick_cases if quick else self.cases),
            lengths=sorted(set(self.quick_lengths if quick else self.lengths)),
        )

    def lengths_of(self, case: str) -> list[int]:
        """Steps of this case's trainings."""
        return sorted({min(steps, self.most_steps.get(case, steps)) for steps in self.lengths})

    def tasks(self) -> list[Task]:
        """All trainings, case by case."""
        return list({task.key: task for case in self.cases for task in self._tasks(case)}.values())

    def _tasks(self, case: str) -> Iterator[Task]:
        """The other arms among the callback's short trainings; then its longest."""
        *short, longest = self.lengths_of(case)
        others = [
            [Task(case=case, arm=arm, steps=self.probe_steps, caches=STATES_OF_OTHERS)]
            for arm in self.arms
            if is_compiled(arm)
        ]
        for tasks in _interleaved(others, [self._in_turns(case, steps) for steps in short]):
            yield from tasks
        yield from self._in_turns(case, longest)

    def _in_turns(self, case: str, steps: int) -> list[Task]:
        """The callback between two trainings of eager at one length, more than once if it is a short one.

        So with all arms that compile nothing.
        """
        before = [arm for arm in UNCOMPILED if arm in self.arms]
        ours = [HOTCOMPILE] if HOTCOMPILE in self.arms else []
        order = [*before, *ours, *map(again, reversed(before))]
        them = [
            Task(case=case, arm=arm, steps=steps, caches=STATES if arm == HOTCOMPILE else (COLD,))
            for arm in order
        ]
        turns = self.turns if steps <= self.turns_up_to else 1
        return [dataclasses.replace(task, turn=turn) for turn in range(turns) for task in them]

    def marks(self, case: str) -> list[int]:
        """Steps after which each training of a case is looked at."""
        return sorted({*self.lengths_of(case), self.probe_steps})

    def run(
        self,
        folder: Path,
        *,
        threads: int = 0,
        command: str = "",
        runner: Runner | None = None,
        console: Console | None = None,
    ) -> list[Cell]:
        """Do what is not done yet, write the results after each task, and return all cells.

        Raises:
            OtherResults: the folder has results of another machine, version or option.
        """
        setting = {**provenance.setting(threads), "threads": threads, "options": dict(self.options)}
        results = Results(folder, {**setting, "probe_steps": self.probe_steps})
        work = [task for task in self.tasks() if not results.is_done(task)]
        facts = provenance.origin(command)
        runner = runner or ProcessRunner(threads=threads, options=self.options)
        console = console or Console()
        with progress_bar(console) as progress, PreparedFolder(runner) as prepared:
            total = progress.add_task("", total=sum(map(expected_s, work)))
            console.print(
                f"{len(work)} tasks, about {sum(map(expected_s, work)) / 60:.0f} min; {folder}",
                markup=False,
                soft_wrap=True,
            )
            _warm_up(work, runner, progress)
            for task in work:
                progress.update(total, description=str(task))
                trouble = _do(task, self.marks(task.case), runner, results, prepared)
                said = f"cannot be run: {trouble}" if trouble else _seconds(results.of(task))
                console.print(f"{task}: {said}", highlight=False, markup=False, soft_wrap=True)
                progress.advance(total, expected_s(task))
                self.write(results, facts)  # at once: whoever stops here loses nothing
        cells = self.write(results, facts)
        if cells:
            tables.picture(cells).savefig(folder / "regret.png", dpi=120)
        console.print(tables.closing_words(cells), highlight=False, markup=False, soft_wrap=True)
        return cells

    def cells(self, results: Results) -> list[Cell]:
        """Of all cases and lengths in the results, those of an earlier command too."""
        found = []
        for case in results.cases:
            runs = results.runs(case)
            lengths = sorted({steps for arm, steps, _ in runs if arm == HOTCOMPILE})
            found += [self._with_gaps(c) for c in cells_of(case, runs, lengths)]
        return found

    def _with_gaps(self, cell: Cell) -> Cell:
        """Regret against some of the other ways only is not regret: a note says so."""
        gaps = [arm for arm in self.arms if arm != HOTCOMPILE and arm not in cell.others_s]
        note = f"not compared with {', '.join(gaps)}: not run, or not possible"
        return dataclasses.replace(cell, notes=(*cell.notes, note)) if gaps else cell

    def write(self, results: Results, facts: Mapping[str, Any]) -> list[Cell]:
        """The files with numbers in the output folder, from what is known so far."""
        cells = self.cells(results)
        changes = {case: drift(results.runs(case)) for case in results.cases}
        tables.write(results, cells, {**results.setting, **facts, "eager_again": changes})
        return cells


def _whole(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} of {value!r} is not allowed: give whole numbers of {least} or more.")


def _interleaved(first: Sequence[_T], second: Sequence[_T]) -> list[_T]:
    """One of each in turn, then what is left of the longer one."""
    both = [item for pair in zip(first, second, strict=False) for item in pair]
    return [*both, *first[len(second) :], *second[len(first) :]]


def _do(
    task: Task, marks: Sequence[int], runner: Runner, results: Results, prepared: PreparedFolder
) -> str | None:
    """Train once for each state of the cache; returns why it cannot be done."""
    arm, done = arm_of(task.arm), {}
    with tempfile.TemporaryDirectory(prefix="regret-") as folder:
        try:
            for cache in task.caches:
                place = prepared.of(task.case) if cache == PREPARED else Path(folder)
                done[cache] = runner(task.case, arm, task.steps, marks, place)
        except RunFailed as error:
            results.add_failure(task, str(error))
            return str(error)
    results.add(task, done)
    return None


def _seconds(runs: Mapping[str, Run]) -> str:
    return ", ".join(f"{cache} {run.wall_s:.2f} s {run.phase}".strip() for cache, run in runs.items())


def _warm_up(work: Sequence[Task], runner: Runner, progress: Progress) -> None:
    """One compile for nothing, or the first arm alone would pay for reading the C++ compiler from disk."""
    first = next((t for t in work if is_compiled(t.arm)), None)
    if first is not None:
        progress.console.print("a compile that is not measured")
        with tempfile.TemporaryDirectory(prefix="regret-") as folder:
            try:
                runner("mlp", "step", 3, (), Path(folder))
            except RunFailed as error:
                progress.console.print(f"it failed: {error}", highlight=False, markup=False, soft_wrap=True)


def expected_s(task: Task) -> float:
    """About how many seconds a task takes; only for the time that is left."""
    steps_s = _STEP_S * task.steps
    compiles = _COMPILE_S + (len(task.caches) - 1) * _WARM_S if is_compiled(task.arm) else 0.0
    return len(task.caches) * (_START_S + steps_s) + compiles
