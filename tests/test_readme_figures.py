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


STATES = ("cold", "warm", "prepared")


def test_the_table_of_regret_is_the_committed_one() -> None:
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for r in csv_rows("regret"):
        of_case = found.setdefault(r["case"], {state: [] for state in STATES})
        of_case[r["cache"]].append((int(r["steps"]), round(float(r["regret"]), 2)))
    shown = {}
    for case, lengths, *cells in rows_below("case | steps"):
        steps = [int(n.replace(",", "")) for n in lengths.split(" / ")]
        values = iter([float(cell) for cell in cells if cell])  # a case of two lengths has no middle one
        shown[case] = {state: [(n, next(values)) for n in steps] for state in STATES}
        assert list(values) == []
    assert shown == found


def test_what_is_said_of_regret_is_what_its_results_say() -> None:
    text = (RESULTS / "regret" / "regret.md").read_text(encoding="utf-8")
    found = re.search(
        r"cold ([\d.]+), warm ([\d.]+), prepared ([\d.]+)\. (\d+) of (\d+) cells above.*? step: ([\d.]+) s",
        text,
    )
    said = re.search(
        r"geometric mean is ([\d.]+) in a first run, ([\d.]+) in a second one and ([\d.]+) after one that "
        r"compiled.*?(\d+) of (\d+) cells are above 1\.05\. The longest single step took ([\d.]+) s",
        README,
    )
    assert found is not None
    assert said is not None
    *means, above, cells, stall = found.groups()
    assert said.groups() == (*(f"{float(m):.2f}" for m in means), above, cells, f"{float(stall):.1f}")


def test_what_is_said_of_regret_elsewhere_is_what_its_results_say() -> None:
    text = (RESULTS / "regret" / "xeon.md").read_text(encoding="utf-8")
    found = re.search(r"cold ([\d.]+), warm ([\d.]+), prepared ([\d.]+)\. (\d+) of \d+ cells above", text)
    worst = re.search(r"## Above the goal\n\n- ([\w-]+), .*?: ([\d.]+) \(", text)
    said = re.search(
        r"had means of ([\d.]+), ([\d.]+) and ([\d.]+),.*?and (\d+) cells were above 1\.05, "
        r"`([\w-]+)` the farthest \(([\d.]+);",
        README,
    )
    assert found is not None
    assert worst is not None
    assert said is not None
    assert said.groups() == (*found.groups(), worst[1], f"{float(worst[2]):.2f}")


def test_the_table_of_the_steady_step_is_the_committed_one() -> None:
    arms = ("eager", "without", "step", "step+optimizer", "step+fused")
    found: dict[str, dict[str, str]] = {}
    for r in csv_rows("steady"):
        measured = f"{float(r['ratio'] or 0):.3f} [{float(r['low'] or 0):.3f}, {float(r['high'] or 0):.3f}]"
        found.setdefault(r["case"], {})[r["plan"]] = measured if r["ratio"] else "not possible"
    shown = {row[0]: row[2:] for row in rows_below("case | callback")}
    by_hand = {case: cells for case, cells in found.items() if set(cells) >= set(arms)}
    assert len(by_hand) < len(found)  # the others are in what is said of all
    assert shown == {case: [cells[arm] for arm in arms] for case, cells in by_hand.items()}


def test_what_is_said_of_the_steady_step_is_what_its_results_say() -> None:
    text = (RESULTS / "steady" / "steady.md").read_text(encoding="utf-8")
    found = re.search(
        r"of eager / ours: ([\d.]+) \((\d+) cases\).*?without the callback / ours: ([\d.]+) \((\d+) cases\)"
        r".*?by hand / ours: ([\d.]+) \((\d+) cases\).*?"
        r"of these and eager / ours: ([\d.]+) \((\d+) cases\)",
        text,
    )
    said = re.search(
        r"over eager, by geometric mean, is ([\d.]+)x for all (\d+) cases.*?never had the callback it is "
        r"([\d.]+)x \((\d+) cases;.*?mean of these is ([\d.]+) for (\d+) cases.*?"
        r"with eager among them it is ([\d.]+) \((\d+) cases\)",
        README,
        re.DOTALL,
    )
    assert found is not None
    assert said is not None
    assert said.groups() == found.groups()


def test_what_is_said_of_freed_memory_is_what_its_results_say() -> None:
    text = (RESULTS / "heap" / "heap.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w-]+ \| ([\d,]+) \| \d+ \| [\d.]+ to [\d.]+ \| ([\d.]+) ", text, re.MULTILINE)
    gains = [float(gain) for faults, gain in rows if faults != "0"]
    assert len(gains) == 5
    assert f"five convolutional networks gained {min(gains):.2f}x to {max(gains):.2f}x by it" in README


def test_what_is_said_of_scopes_is_what_their_results_say() -> None:
    text = (RESULTS / "scopes" / "scopes.md").read_text(encoding="utf-8")
    means = dict(re.findall(r"(step\+optimizer|step|the best of each, eager included,) ([\d.]+x)", text))
    counts = re.findall(r"step(?:\+optimizer)? [\d.]+x \((\d+)\)", text)
    rows = re.findall(r"^\| [\w-]+ +\|", text, re.MULTILINE)
    said = re.search(
        r"On (\d+) of (\d+) small models.*?compiled gained ([\d.]+x).*?alone ([\d.]+x).*?"
        r"eager included, ([\d.]+x)",
        README,
    )
    assert said is not None
    assert list(said.groups()) == [*set(counts), str(len(rows) - 1), *means.values()]


def test_the_receipt_says_the_same_in_its_headline_and_its_rows() -> None:
    (receipt,) = re.findall(r"<!-- receipt -->\n(.+?)<!-- /receipt -->", README, re.DOTALL)
    speeds = re.findall(r"(?:steady:|speed-up +)\s*([\d.]+)x faster", receipt)
    break_evens = re.findall(r"break-even\s+at step (\d+)", receipt)
    assert [len(speeds), len(break_evens)] == [2, 2]
    assert len(set(speeds)) == len(set(break_evens)) == 1
