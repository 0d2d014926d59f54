"""The receipt as text and as Markdown, both from the same facts and tables."""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightning_hotcompile.plan.tree import printable
from lightning_hotcompile.receipt import wording
from lightning_hotcompile.receipt.wording import count

if TYPE_CHECKING:
    from lightning_hotcompile.receipt.report import PhaseStats, RegionProof, Report

TEXT_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled table; columns whose name starts with ``#`` hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    """Sentences too long for a column, shown below."""


def report_to_text(report: Report) -> str:
    """The receipt for a terminal, 100 columns wide, without colour codes."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=TEXT_WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # or a notebook would show the text instead of returning it
        legacy_windows=False,
        highlight=False,
    )
    console.print(Rule("hotcompile receipt", characters="─"))
    console.print(Text(wording.headline(report)), Text(), _grid(facts(report)), sep="\n")
    if report.plan.strip():
        console.print(Text(), Text(plan_title(report)), Text(_folded(report.plan)), sep="\n")
    for section in sections(report):
        console.print(Text(), Text(section.title), _table(section), sep="\n")
        if section.remarks:
            console.print(Text(_bullets(section.remarks)))
    if report.notes:
        console.print(Text(), Text("Notes"), Text(_bullets(report.notes)), sep="\n")
    if report.versions:
        console.print(Text(), Text(_versions(report)), sep="\n")
    console.print(Rule(characters="─"))
    return printable("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


def report_to_markdown(report: Report) -> str:
    """The receipt as a Markdown page with pipe tables."""
    head = Section(title="hotcompile receipt", columns=("what", "value"), rows=tuple(facts(report)))
    blocks = [f"## {head.title}", f"**{_escaped(wording.headline(report))}**", _pipe_table(head)]
    if report.plan.strip():
        blocks += [f"### {plan_title(report)}", _fenced(report.plan)]
    for section in sections(report):
        blocks += [f"### {section.title}", _pipe_table(section), *_markdown_bullets(section.remarks)]
    if report.notes:
        blocks += ["### Notes", *_markdown_bullets(report.notes)]
    if report.versions:
        blocks += [_escaped(_versions(report))]
    return "\n\n".join(blocks) + "\n"


def facts(report: Report) -> list[tuple[str, str]]:
    """Name and value of each single fact; those without a measurement come last, in one row."""
    reason = wording.one_line(report.reason)
    rows = [
        ("reason", "" if reason in wording.headline(report) else reason),
        ("decision", wording.one_line(report.decision)),
        ("steps seen", str(report.steps)),
        ("eager step", wording.step_time(report.eager_ms)),
        ("compiled step", wording.step_time(report.compiled_ms)),
        ("speed-up", _speed_up(report)),
        *((each.name, wording.fused(each)) for each in report.fused),
        ("compiling", _compiling(report)),
        ("balance", wording.balance(report) if report.compile_s > 0 else ""),
        ("graphs", _graphs(report)),
        ("parity", wording.one_line(report.parity)),
        ("peak memory", wording.memory(report.peak_memory_mb)),
        ("between steps", wording.number(report.wait_share, ".1%", " of the time")),
        ("cost of watching", wording.number(report.overhead_us, ".1f", " us a step")),
    ]
    absent = ", ".join(name for name, value in rows if value == wording.NOT_MEASURED)
    known = [(name, value) for name, value in rows if value not in ("", wording.NOT_MEASURED)]
    return known + ([(wording.NOT_MEASURED, absent)] if absent else [])


def plan_title(report: Report) -> str:
    """What stands above the plan: its branches say "compiled", also where it was never carried out."""
    title = "Plan"
    if report.plan_digest[:8] not in report.plan:  # else the tree's own first line says scope and digest
        title += f" {report.plan_digest[:8]}: scope {report.scope}"
    if report.compile_s > 0 or any(region.runs for region in report.regions):
        return title
    return f"{title}, not carried out{'' if report.ended else ' so far'}"


def sections(report: Report) -> list[Section]:
    """The tables of regions and of phases, those that have rows."""
    proven = sum(region.proven for region in report.regions)
    regions = Section(
        title=f"Regions: {proven} of {len(report.regions)} proven to have run compiled",
        columns=("region", "kind", "members", "#graphs", "#runs", "#compile", "proven"),
        rows=tuple(map(_region_row, report.regions)),
        remarks=tuple(f"{region.name}: {region.note}" for region in report.regions if region.note),
    )
    phases = Section(
        title="Phases",
        columns=("phase", "#steps", "#median step", "#IQR", "#total"),
        rows=tuple(map(_phase_row, report.phases)),
    )
    return [section for section in (regions, phases) if section.rows]


def _region_row(region: RegionProof) -> tuple[str, ...]:
    return (
        region.name,
        region.kind,
        "" if region.members == (region.name,) else wording.names(region.members),
        str(region.graphs),
        str(region.runs),
        wording.seconds(region.compile_s),
        "yes" if region.proven else "NO",
    )


def _phase_row(phase: PhaseStats) -> tuple[str, ...]:
    median, iqr = wording.milliseconds(phase.median_ms), wording.milliseconds(phase.iqr_ms)
    return (phase.name, str(phase.steps), median, iqr, wording.seconds(phase.total_s))


def _speed_up(report: Report) -> str:
    pairs = "" if report.speedup is None else f", {count(report.speedup.n, 'pair')}"
    return f"{wording.speed(report.speedup).removeprefix('speed-up ')}{pairs}"


def _compiling(report: Report) -> str:
    if report.compile_s == 0 and report.stall_s == 0:
        return "none"
    return f"{wording.seconds(report.compile_s)}; training stood still for {wording.seconds(report.stall_s)}"


def _graphs(report: Report) -> str:
    if not report.regions and not report.recompiles and not report.graph_breaks and report.compile_s == 0:
        return ""  # nothing was compiled, so there was nothing to count
    breaks = None if report.graph_breaks is None else count(report.graph_breaks, "graph break")
    return ", ".join(filter(None, [count(report.recompiles, "recompile"), breaks]))


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _grid(rows: list[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    return Padding(grid, (0, 0, 0, 2))


def _table(section: Section) -> Table:
    used = [i for i in range(len(section.columns)) if any(row[i] for row in section.rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in (section.columns[i] for i in used):
        # Words may wrap, numbers never: a number broken over two lines is misread.
        number = column.startswith("#")
        justify: JustifyMethod = "right" if number else "left"
        table.add_column(column.lstrip("#"), justify=justify, no_wrap=number, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(row[i]) for i in used))
    return table


def _folded(tree: str) -> str:
    """A tree whose long lines go on under their own beginning, so that its shape stays readable."""
    lines: list[str] = []
    for line in tree.rstrip().splitlines():
        depth = len(line) - len(line.lstrip(" │├└─|`+-"))
        lines += textwrap.wrap(
            line, TEXT_WIDTH - 2, subsequent_indent=" " * (depth + 2), drop_whitespace=True
        ) or [""]
    return "\n".join(lines)


def _bullets(sentences: tuple[str, ...]) -> str:
    wrapped = (textwrap.wrap(s, TEXT_WIDTH, initial_indent="- ", subsequent_indent="  ") for s in sentences)
    return "\n".join("\n".join(lines) for lines in wrapped)


def _pipe_table(section: Section) -> str:
    header = [column.lstrip("#") for column in section.columns]
    marks = ["---:" if column.startswith("#") else "---" for column in section.columns]
    body = [[_escaped(cell) for cell in row] for row in section.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, marks, *body))


def _markdown_bullets(sentences: tuple[str, ...]) -> list[str]:
    return ["\n".join(f"- {_escaped(sentence)}" for sentence in sentences)] if sentences else []


def _escaped(text: str) -> str:
    """Text that stays itself in Markdown: one line, no pipe, emphasis or tag taken for markup."""
    html = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    # An underscore inside a word is plain text, and so is a bracket that no "(" makes a link.
    return re.sub(r"([\\|*`]|(?<![^\W_])_|_(?![^\W_])|](?=\())", r"\\\1", html)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
