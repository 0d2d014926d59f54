"""The README's figures are those of the committed results."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "recipes" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table whose first line starts so, without its head."""
    lines = README[README.index(f"| {heading} |") :].splitlines()[2:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in table]


def csv_rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", rows_below("suite"), ids=lambda row: re.sub(r"\W.*", "", row[0].strip("[")))
def test_a_suites_row_is_what_its_results_say(row: list[str]) -> None:
    name = re.match(r"\[(\w+)\]", row[0])
    assert name is not None
    text = (RESULTS / name[1] / f"{name[1]}.md").read_text(encoding="utf-8")
    mean = re.search(r"Over (\d+) compiled measurements the geometric mean is ([\d.]+x)", text)
    assert mean is not None
    counts = [re.search(rf"{word} in (\d+)", text) for word in ("Faster", "Slower")]
    assert row[1:] == [mean[1], *[found[1] for found in counts if found is not None], mean[2]]


def test_the_table_of_regret_is_the_committed_one() -> None:
    found = {
        (r["case"], int(r["steps"]), r["cache"]): round(float(r["regret"]), 2) for r in csv_rows("regret")
    }
    shown = {}
    for case, steps, cold, warm in rows_below("case | steps"):
        length = int(steps.replace(",", ""))
        shown[case, length, "cold"], shown[case, length, "warm"] = float(cold), float(warm)
    assert shown == found


def test_the_table_of_the_steady_step_is_the_committed_one() -> None:
    arms = ("eager", "step", "step+optimizer")
    found: dict[str, dict[str, str]] = {}
    for r in csv_rows("steady"):
        measured = f"{float(r['ratio'] or 0):.3f} [{float(r['low'] or 0):.3f}, {float(r['high'] or 0):.3f}]"
        found.setdefault(r["case"], {})[r["plan"]] = measured if r["ratio"] else "not possible"
    shown = {row[0]: row[2:] for row in rows_below("case | callback")}
    assert shown == {case: [cells[arm] for arm in arms] for case, cells in found.items()}


def test_the_table_of_freed_memory_is_the_committed_one() -> None:
    lines = (RESULTS / "heap" / "heap.md").read_text(encoding="utf-8").splitlines()
    committed = [line for line in lines if re.match(r"\| [\w-]+ \| [\d,]+ \|", line)]
    assert rows_below("case | page faults") == [
        [cell.strip() for cell in line.strip("|").split("|")] for line in committed
    ]


def test_the_table_of_scopes_is_the_committed_one() -> None:
    names = ("step+optimizer", "step", "module+optimizer", "regions+optimizer")
    found: dict[str, dict[str, str]] = {}
    for r in csv_rows("scopes"):
        found.setdefault(r["case"], {})[r["plan"]] = f"{float(r['speedup']):.2f}x" if r["speedup"] else "-"
    shown = {row[0]: row[2:] for row in rows_below("case | eager step")}
    assert shown == {case: [plans.get(name, "-") for name in names] for case, plans in found.items()}


def test_the_receipt_says_the_same_in_its_headline_and_its_rows() -> None:
    (receipt,) = re.findall(r"<!-- receipt -->\n(.+?)<!-- /receipt -->", README, re.DOTALL)
    speeds = re.findall(r"(?:steady:|speed-up +)\s*([\d.]+)x faster", receipt)
    break_evens = re.findall(r"break-even\s+at step (\d+)", receipt)
    assert [len(speeds), len(break_evens)] == [2, 2]
    assert len(set(speeds)) == len(set(break_evens)) == 1
