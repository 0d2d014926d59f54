"""The output folder of the suite ``regret``: JSON, CSV, a Markdown page and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from matplotlib.figure import Figure

from lightning_hotcompile.bench.other_ways import STATES
from lightning_hotcompile.bench.prepared import PREPARING_STEPS
from lightning_hotcompile.bench.regret import GOAL, Cell, rows, summary
from lightning_hotcompile.bench.results import Results

COLUMNS = (
    "case",
    "steps",
    "cache",
    "regret",
    "best",
    "hotcompile_s",
    "best_s",
    "worst_step_s",
    "phase",
)
"""What the page shows of each cell; the CSV has all."""

_TITLES = {
    "cold": "cold compiler cache",
    "warm": "warm compiler cache",
    "prepared": "after one that compiled",
}

HOW = f"""\
Regret is the wall time of `Trainer.fit` with the callback over that of the fastest other way: eager,
`model.compile()`, `.compile()` on each repeated block, and `training_step` compiled by hand with its logs
replayed, without and with a compiled optimizer. `eager+fused` and `step+fused`, where they were chosen, have
torch's fused kernel for the optimizer. 1 is no regret; the goal is {GOAL} or less. Each training
has a process (forked from one that has imported PyTorch and Lightning, on Linux with memory of its own before
anything is timed, and with two eager steps behind it) and, when cold, empty folders of its own; warm is the
second one with the same folders. Where the callback has declined in the first, its second one finds no code,
while the others have compiled in theirs whatever it cost. So there is a third state: prepared, after a
training of {PREPARING_STEPS} steps with `cost_gate=False`, and after the shorter ones of this state. It is
compared with the warm ones of the others.

The callback is measured at each length between two trainings of eager (and of `eager+fused`); at the short
lengths of several the one with the median time counts. The compiled arms train for some steps only, cold and
warm and warm again, and are carried on by their steady step (the median for each batch of the cycle over the
second half), times what eager's mean step of the length in question is over its steady one: rare slow steps
are in long trainings only. So each other way has two times, and the best one is chosen by the one and timed
by the other, and the other way round: the least of ten times is a lucky one, not a fast one. Columns hold the
mean of the two.

Others use the machine as well, and a training takes half as long again some minutes later. So a fixed piece
of work (12 times a matrix product, GELU and a normalisation) is timed four times a second beside each
training, outside of its clock, and all times are given for a machine on which that takes 2 ms. It is not
timed while the callback's child process compiles, whose cost for the training is the callback's. Seconds in
which a training waits for data count as they are."""


def frame(cells: Sequence[Cell]) -> pd.DataFrame:
    """All columns, one row for each cell; arms that could not be run have no number."""
    return pd.DataFrame(rows(cells))


def write(results: Results, cells: Sequence[Cell], facts: Mapping[str, Any]) -> None:
    """All files but the picture; without a cell the JSON only."""
    found = summary(cells)
    results.write({**facts, "summary": found, "cells": rows(cells)})
    folder = results.file.parent
    if cells:
        frame(cells).to_csv(folder / "regret.csv", index=False)
        (folder / "regret.md").write_text(page(cells, results.failures, facts), encoding="utf-8")


def page(cells: Sequence[Cell], failures: Sequence[str], facts: Mapping[str, Any]) -> str:
    """The Markdown page."""
    table = frame(cells)[list(COLUMNS)].to_markdown(index=False)
    sections = [
        "# Regret",
        closing_words(cells),
        HOW,
        table,
        *_list("Above the goal", _above(cells)),
        *_list("Eager's longest training after the callback's", _changes(facts.get("eager_again", {}))),
        *_list("Notes", _notes(cells)),
        *_list("Could not be run", failures),
        *_list("Where this comes from", _origin(facts)),
    ]
    return "\n\n".join(sections) + "\n"


def closing_words(cells: Sequence[Cell]) -> str:
    """A few lines that say it all."""
    if not cells:
        return "No cell is complete yet."
    means = summary(cells)["geometric_mean"]
    shown = [f"{cache} {means[cache]:.3f}" for cache in STATES if means[cache] is not None]
    above = sum(c.regret > GOAL for c in cells)
    worst = max(cells, key=lambda c: c.worst_step_s)
    return (
        f"Geometric mean of regret: {', '.join(shown)}. {above} of {len(cells)} cells above {GOAL}. "
        f"Worst single step: {worst.worst_step_s:.2f} s ({_place(worst)})."
    )


def _place(cell: Cell) -> str:
    return f"{cell.case}, {cell.steps} steps, {cell.cache}"


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _above(cells: Sequence[Cell]) -> list[str]:
    worst_first = sorted((c for c in cells if c.regret > GOAL), key=lambda c: -c.regret)
    return [
        f"{_place(c)}: {c.regret:.3f} ({c.hotcompile_s:.2f} s; {c.best} {c.best_s:.2f} s); "
        f"{c.phase}: {' '.join(c.reason.split())}"
        for c in worst_first
    ]


def _changes(changes: Mapping[str, float | None]) -> list[str]:
    return [f"{case}: {ratio:.3f} of the first" for case, ratio in changes.items() if ratio is not None]


def _notes(cells: Sequence[Cell]) -> list[str]:
    where: dict[str, list[str]] = {}
    for cell in cells:
        for note in cell.notes:
            where.setdefault(f"{cell.case}: {note}", []).append(f"{cell.steps} {cell.cache}")
    return [f"{note} ({', '.join(places)})" for note, places in where.items()]


def _origin(facts: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    named = {**facts, "versions": versions, "command": f"`{facts.get('command')}`"}
    return [
        f"{name}: {named[name]}"
        for name in ("command", "date", "commit", "machine", "versions", "options")
        if facts.get(name)
    ]


def picture(cells: Sequence[Cell]) -> Figure:
    """Regret of each case, a panel for each state of the cache, a mark for each length."""
    cases = list(dict.fromkeys(c.case for c in cells))
    lengths = sorted({c.steps for c in cells})
    figure = Figure(figsize=(13, 1.6 + 0.35 * len(cases)), layout="constrained")
    panels = figure.subplots(1, len(_TITLES), sharey=True, sharex=True, squeeze=False)[0]
    for panel, (cache, title) in zip(panels, _TITLES.items(), strict=True):
        for steps, marker in zip(lengths, "osD^v<>*" * len(lengths), strict=False):
            found = [c for c in cells if c.steps == steps and c.cache == cache]
            places = [cases.index(c.case) for c in found]
            panel.plot([c.regret for c in found], places, marker, label=f"{steps} steps", alpha=0.8)
        panel.axvline(1.0, color="0.7", linewidth=1)
        panel.axvline(GOAL, color="tab:red", linestyle="--", linewidth=1, label=f"goal {GOAL}")
        panel.set(title=title, xlabel="regret (1 = the best other way)")
        panel.set_yticks(range(len(cases)), cases)
        panel.grid(axis="y", alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
