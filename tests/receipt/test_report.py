"""The receipt as dictionary, JSON, CSV, text and Markdown."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from lightning_hotcompile.machine import Phase
from lightning_hotcompile.plan.planner import plan_compile
from lightning_hotcompile.receipt.event_kinds import Compiled
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.report import PhaseStats, RegionProof, Report, printed_later
from lightning_hotcompile.receipt.wording import UNDECIDED, headline
from lightning_hotcompile.watch.stats import Ratio, Summary

TREE = """plan 3fa29c1b: scope regions (24 repeated blocks)
├── compiled
│   └── net.blocks.*: Block x24 as one group, 12,345 parameters each
└── left eager
    └── metrics.perplexity (Perplexity): holds state"""

BLOCKS = RegionProof(
    name="net.blocks.*",
    kind="group",
    members=tuple(f"net.blocks.{i}" for i in range(24)),
    graphs=1,
    runs=75_360,
    compile_s=9.8,
    proven=True,
)
HEAD = RegionProof(
    name="net.head",
    kind="module",
    members=("net.head",),
    graphs=0,
    runs=0,
    compile_s=0.0,
    proven=False,
    note="Dynamo skipped the frame | it is torch's own",
)
STEADY = Report(
    phase="steady",
    reason="compiled steps are faster than eager ones",
    scope="regions",
    plan=TREE,
    plan_digest="3fa29c1be077",
    decision="go: 9.0 s saved against 6 s of compiling",
    steps=3230,
    eager_ms=Summary(n=40, median=11.23, q1=11.0, q3=11.42),
    compiled_ms=Summary(n=40, median=7.91, q1=7.8, q3=8.02),
    speedup=Ratio(value=1.42, low=1.38, high=1.47, n=40, confidence=0.95),
    compile_s=12.3,
    stall_s=13.04,
    break_even_step=870,
    saved_s=34.1,
    total_speedup=1.893,
    recompiles=1,
    graph_breaks=2,
    regions=(BLOCKS,),
    parity="not checked",
    peak_memory_mb={"eager": 812.5, "compiled": 790.25},
    overhead_us=14.2,
    wait_share=0.031,
    phases=(
        PhaseStats(name="observing", steps=10, median_ms=11.3, iqr_ms=0.4, total_s=0.12),
        PhaseStats(name="flipping", steps=1, median_ms=None, iqr_ms=None, total_s=13.04),
        PhaseStats(name="steady", steps=3219, median_ms=7.91, iqr_ms=0.22, total_s=25.1),
    ),
    notes=("a <lambda> in net.blocks.* | is kept",),
    versions={"torch": "2.13.0", "lightning": "2.6.6"},
    events=(event_to_dict(Compiled(step=10, time=1.5, region="a", seconds=2.0, n_ops=9, cache_hit=None)),),
)
BARE = Report(
    phase="observing",
    reason="no step came back 10 times in a row",
    scope="auto",
    plan="",
    plan_digest="",
    decision="",
    steps=7,
    compile_s=0.0,
    stall_s=0.0,
    recompiles=0,
    graph_breaks=0,
    parity="not checked",
)
DECLINED = dataclasses.replace(BARE, phase="declined", reason="40 steps remain.", decision="no: too few")
REVERTED = dataclasses.replace(
    STEADY,
    phase="reverted",
    reason="0.93x is below min_speedup=1.02",
    speedup=Ratio(value=0.93, low=0.91, high=0.95, n=40, confidence=0.95),
    saved_s=-13.4,
    total_speedup=0.746,
    break_even_step=None,
)
NO_DIFFERENCE = dataclasses.replace(
    STEADY,
    speedup=Ratio(value=1.01, low=0.98, high=1.03, n=40, confidence=0.95),
    saved_s=-12.9,
    total_speedup=0.753,
    break_even_step=None,
)
UNPROVEN = dataclasses.replace(STEADY, regions=(BLOCKS, HEAD))
NOT_FINITE = dataclasses.replace(
    STEADY,
    speedup=Ratio(value=math.nan, low=math.nan, high=math.inf, n=0, confidence=0.95),
    eager_ms=Summary(n=1, median=math.nan, q1=math.nan, q3=math.nan),
    saved_s=math.nan,
    total_speedup=math.nan,
    break_even_step=None,
    overhead_us=math.inf,
    wait_share=math.nan,
    peak_memory_mb={"eager": math.nan},
)
ALL = {
    "steady": STEADY,
    "bare": BARE,
    "declined": DECLINED,
    "reverted": REVERTED,
    "no difference": NO_DIFFERENCE,
    "unproven": UNPROVEN,
    "not finite": NOT_FINITE,
}
each_report = pytest.mark.parametrize("report", ALL.values(), ids=ALL.keys())


class TestHeadline:
    @pytest.mark.parametrize(
        ("report", "expected"),
        [
            (
                STEADY,
                "steady: 1.42x faster (95% interval 1.38 to 1.47), 34.1 s saved after 12.3 s of compiling; "
                "break-even at step 870",
            ),
            (
                NO_DIFFERENCE,
                "steady: no difference from eager (1.01x, 95% interval 0.98 to 1.03), "
                "12.9 s lost after 12.3 s of compiling; no break-even",
            ),
            (
                REVERTED,
                "reverted, back to eager: 0.93x is below min_speedup=1.02; measured slower, "
                "0.93x of eager's speed (95% interval 0.91 to 0.95); 13.4 s lost after 12.3 s of compiling",
            ),
            (DECLINED, "declined, stayed eager: 40 steps remain"),
            (BARE, "observing: no step came back 10 times in a row; nothing was compiled"),
            (
                dataclasses.replace(BARE, phase="prewarming", reason="worth it: 900 steps are left"),
                "prewarming, eager so far, while a child process compiles: worth it: 900 steps are left",
            ),
            (
                NOT_FINITE,
                "steady: speed-up not measured, saving not measured after 12.3 s of compiling; "
                "break-even not measured",
            ),
        ],
    )
    def test_one_sentence(self, report: Report, expected: str) -> None:
        assert headline(report) == expected

    def test_the_phases_that_a_verdict_ends_are_those_of_the_machine(self) -> None:
        assert set(UNDECIDED) == {str(phase) for phase in Phase if phase.is_at_work}

    @pytest.mark.parametrize("phase", UNDECIDED)
    def test_a_run_that_is_over_before_its_verdict_says_so_and_what_it_waited(self, phase: str) -> None:
        going_on = dataclasses.replace(STEADY, phase=phase, reason="worth it", speedup=None, stall_s=12.6)
        assert headline(going_on).endswith("worth it; training stood still for 12.6 s")
        assert headline(dataclasses.replace(going_on, ended=True)).endswith(
            "worth it; the run ended before there was a verdict; training stood still for 12.6 s"
        )

    @pytest.mark.parametrize("decided", [STEADY, REVERTED, DECLINED])
    def test_a_verdict_is_told_alike_while_the_run_goes_on_and_after_it(self, decided: Report) -> None:
        assert headline(dataclasses.replace(decided, ended=True)) == headline(decided)

    def test_a_region_that_did_not_run_compiled_is_never_passed_over(self) -> None:
        assert headline(UNPROVEN).endswith("; 1 of 2 planned regions did NOT run compiled")

    def test_a_break_even_to_come_is_called_expected(self) -> None:
        report = dataclasses.replace(STEADY, saved_s=-3.0, break_even_step=9100)
        assert headline(report).endswith(
            "3.00 s lost after 12.3 s of compiling; break-even expected at step 9100"
        )

    def test_it_is_one_line_whatever_the_reason(self) -> None:
        report = dataclasses.replace(REVERTED, speedup=None, reason="Error:\n  line one\n  line two.")
        assert headline(report).startswith("reverted, back to eager: Error: line one line two; 13.4 s lost")


class TestShown:
    """A report is what many look at first: as they see it by ``print``, at a prompt, and in a notebook."""

    @each_report
    def test_it_prints_as_its_text(self, report: Report) -> None:
        assert str(report) == report.to_text()

    @each_report
    def test_at_a_prompt_it_is_one_line(self, report: Report) -> None:
        shown = repr(report)
        assert headline(report) in shown
        assert f"{report.steps} steps" in shown
        assert len(shown.splitlines()) == 1

    @each_report
    def test_a_notebook_shows_its_markdown(self, report: Report) -> None:
        assert report._repr_markdown_() == report.to_markdown()


class TestDictAndJson:
    @each_report
    def test_json_round_trip(self, report: Report) -> None:
        assert json.loads(report.to_json()) == report.to_dict()

    def test_any_encoding_of_a_file_takes_the_json(self, tmp_path: Path) -> None:
        report = dataclasses.replace(STEADY, reason="größer als 1 µs", plan="└── 网")
        file = tmp_path / "report.json"
        file.write_text(report.to_json(), encoding="cp1252")  # as Windows' Path.write_text does
        assert json.loads(file.read_text(encoding="utf-8")) == report.to_dict()

    @each_report
    def test_only_plain_json_types(self, report: Report) -> None:
        json.dumps(report.to_dict(), allow_nan=False)

    def test_every_field_is_there_after_the_headline(self) -> None:
        names = ["headline", *(f.name for f in dataclasses.fields(Report))]
        assert list(STEADY.to_dict()) == names

    def test_derived_numbers_are_written_out(self) -> None:
        record = STEADY.to_dict()
        assert record["speedup"]["verdict"] == "faster"
        assert record["eager_ms"]["iqr"] == pytest.approx(0.42)
        assert record["regions"][0]["members"][:2] == ["net.blocks.0", "net.blocks.1"]
        assert record["events"][0]["kind"] == "compiled"

    def test_what_was_not_measured_is_null_never_0(self) -> None:
        for name in (
            "speedup",
            "eager_ms",
            "compiled_ms",
            "saved_s",
            "total_speedup",
            "break_even_step",
            "overhead_us",
            "wait_share",
        ):
            assert BARE.to_dict()[name] is None
        assert NOT_FINITE.to_dict()["saved_s"] is None
        assert NOT_FINITE.to_dict()["speedup"]["high"] is None
        assert NOT_FINITE.to_dict()["peak_memory_mb"] == {"eager": None}

    def test_numbers_of_other_libraries_become_plain(self) -> None:
        report = dataclasses.replace(STEADY, saved_s=np.float32(1.5), steps=np.int64(3))  # type: ignore[arg-type]
        record = report.to_dict()
        assert (type(record["saved_s"]), type(record["steps"])) == (float, int)
        assert record["saved_s"] == 1.5

    def test_it_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            STEADY.steps = 1  # type: ignore[misc]


def rows_of(report: Report) -> dict[str, str]:
    header, *rows = csv.reader(io.StringIO(report.to_csv()))
    assert header == ["key", "value"]
    assert len({key for key, _ in rows}) == len(rows)
    return dict(rows)


class TestCsv:
    @each_report
    def test_pandas_reads_it(self, report: Report) -> None:
        pandas = pytest.importorskip("pandas")
        table = pandas.read_csv(io.StringIO(report.to_csv()))
        assert list(table.columns) == ["key", "value"]
        assert len(table) == len(rows_of(report))
        saved = float(table.set_index("key")["value"]["saved_s"])
        assert saved == report.saved_s or math.isnan(saved)

    def test_keys_are_paths_and_values_are_exact(self) -> None:
        rows = rows_of(STEADY)
        assert float(rows["speedup.value"]) == 1.42
        assert rows["regions.0.runs"] == "75360"
        assert rows["phases.2.name"] == "steady"
        assert rows["plan"] == TREE
        assert not any(key.startswith("events") for key in rows)

    def test_absent_values_are_empty_and_zero_is_zero(self) -> None:
        rows = rows_of(BARE)
        assert rows["saved_s"] == rows["speedup"] == ""
        assert rows["compile_s"] == "0.0"


class TestText:
    @each_report
    def test_plain_and_100_wide(self, report: Report) -> None:
        lines = report.to_text().splitlines()
        assert "\x1b" not in report.to_text()
        assert max(map(len, lines)) == 100
        assert all(line == line.rstrip() for line in lines)

    @each_report
    def test_the_headline_comes_first(self, report: Report) -> None:
        body = " ".join(report.to_text().splitlines()[1:])
        assert body.startswith(headline(report))

    @each_report
    def test_no_nan_and_no_none(self, report: Report) -> None:
        for text in (report.to_text(), report.to_markdown()):
            assert not re.search(r"\b(nan|inf|None)\b", text)

    def test_colours_asked_for_by_the_environment_do_not_get_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = STEADY.to_text()
        for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "40"), ("TERM", "xterm-256color")):
            monkeypatch.setenv(name, value)
        assert STEADY.to_text() == plain

    @pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
    def test_it_can_be_printed_whatever_the_output_writes(
        self, encoding: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Into a file or pipe on Windows, say, which has no lines of trees."""
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out := io.BytesIO(), encoding=encoding))
        plan = plan_compile(nn.Sequential(nn.Linear(64, 64)), scope="regions")
        print(STEADY.to_text(), plan, flush=True)
        text = out.getvalue().decode(encoding)
        assert ("└── left eager" if encoding == "utf-8" else "+-- left eager") in text
        assert f"plan {plan.digest}" in text
        assert ("─" * 100 in text) == (encoding == "utf-8") == ("-" * 100 not in text)

    def test_in_a_notebook_it_is_returned_and_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
        assert headline(DECLINED) in DECLINED.to_text()

    def test_square_brackets_are_text_not_markup(self) -> None:
        report = dataclasses.replace(STEADY, reason="[red]targets=['a'][/red] :smile:")
        assert "[red]targets=['a'][/red] :smile:" in report.to_text()

    def test_facts_with_their_spread(self) -> None:
        text = STEADY.to_text()
        assert "eager step        11.2 ms (IQR 0.420 ms, 40 steps)" in text
        assert "speed-up          1.42x faster (95% interval 1.38 to 1.47), 40 pairs" in text
        assert "12.3 s; training stood still for 13.0 s" in text
        assert "34.1 s saved (1.89x in all, costs included); break-even at step 870" in text
        assert "13.4 s lost (0.75x in all, costs included); no break-even" in REVERTED.to_text()
        assert "saving not measured; break-even not measured" in NOT_FINITE.to_text()
        assert "1 recompiles, 2 graph breaks" not in text
        assert "1 recompile, 2 graph breaks" in text
        assert "eager 812.5 MB, compiled 790.2 MB" in text
        assert "3.1% of the time" in text
        assert "\n  not measured" not in text

    def test_nothing_is_counted_where_nothing_was_compiled(self) -> None:
        assert "recompile" not in DECLINED.to_text()
        assert "0 recompiles, 0 graph breaks" in dataclasses.replace(DECLINED, compile_s=1.0).to_text()
        unknown = dataclasses.replace(DECLINED, compile_s=1.0, graph_breaks=None).to_text()
        assert "0 recompiles" in unknown
        assert "graph break" not in unknown

    def test_what_was_not_measured_is_said_by_name(self) -> None:
        (line,) = (line for line in DECLINED.to_text().splitlines() if line.startswith("  not measured"))
        for name in ("eager step", "compiled step", "speed-up", "peak memory", "cost of watching"):
            assert name in line
        assert "not measured" in NOT_FINITE.to_text()

    def test_plan_tree_keeps_its_shape(self) -> None:
        assert TREE in STEADY.to_text()
        assert "Plan" not in BARE.to_text()

    def test_a_plan_that_does_not_name_itself_gets_a_title(self) -> None:
        report = dataclasses.replace(STEADY, plan="net\n└── head")
        assert "Plan 3fa29c1b: scope regions" in report.to_text()

    def test_a_plan_that_was_not_carried_out_says_so(self) -> None:
        assert "\nPlan\n" in STEADY.to_text()
        not_yet = dataclasses.replace(STEADY, phase="observing", compile_s=0.0, regions=())
        assert "\nPlan, not carried out so far\n" in not_yet.to_text()
        never = dataclasses.replace(not_yet, phase="declined", ended=True)
        assert "\nPlan, not carried out\n" in never.to_text()
        assert "\n### Plan, not carried out\n" in never.to_markdown()

    def test_compiled_code_that_was_found_carries_out_a_plan(self) -> None:
        assert "\nPlan\n" in dataclasses.replace(STEADY, compile_s=0.0).to_text()

    def test_a_long_line_of_the_plan_goes_on_below_its_beginning(self) -> None:
        report = dataclasses.replace(STEADY, plan="net\n└── " + "word " * 30)
        start = report.to_text().splitlines().index("net")
        following = report.to_text().splitlines()[start + 1 : start + 3]
        assert following[0].startswith("└── word")
        assert following[1].startswith("      word")

    def test_proof_of_each_region(self) -> None:
        text = UNPROVEN.to_text()
        assert "Regions: 1 of 2 proven to have run compiled" in text
        assert re.search(r"^net\.blocks\.\*.*75360.*yes$", text, re.MULTILINE)
        assert re.search(r"^net\.head.*NO$", text, re.MULTILINE)
        assert "- net.head: Dynamo skipped the frame" in text

    def test_phases_with_an_untimed_one(self) -> None:
        text = STEADY.to_text()
        assert re.search(r"^flipping +1 +not measured +not measured +13\.0 s$", text, re.MULTILINE)
        assert re.search(r"^steady +3219 +7\.91 ms +0\.220 ms +25\.1 s$", text, re.MULTILINE)

    def test_the_reason_is_not_said_twice(self) -> None:
        assert REVERTED.to_text().count("is below min_speedup") == 1
        assert STEADY.to_text().count(STEADY.reason) == 1


def pipe_tables(markdown: str) -> list[list[list[str]]]:
    """The tables of a page, each a list of rows, each a list of cells; escaped pipes do not part cells."""
    blocks = [b.splitlines() for b in markdown.split("\n\n") if b.startswith("|")]
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block] for block in blocks]


class TestMarkdown:
    @each_report
    def test_tables_are_well_formed(self, report: Report) -> None:
        tables = pipe_tables(report.to_markdown())
        assert tables
        for table in tables:
            assert len({len(row) for row in table}) == 1
            assert all(re.fullmatch(r" ---:? ", cell) for cell in table[1])
            assert len(table) > 2

    def test_every_section_is_there(self) -> None:
        page = UNPROVEN.to_markdown()
        titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
        assert titles == [
            "hotcompile receipt",
            "Plan",
            "Regions: 1 of 2 proven to have run compiled",
            "Phases",
            "Notes",
        ]
        assert f"```text\n{TREE}\n```" in page

    def test_markup_in_names_and_reasons_stays_text(self) -> None:
        page = UNPROVEN.to_markdown()
        assert r"a &lt;lambda> in net.blocks.\* \| is kept" in page
        assert r"| net.blocks.\* |" in page
        assert r"frame \| it is torch's own" in page

    @pytest.mark.parametrize(
        ("text", "escaped"),
        [
            ("keep_eager=['a']", "keep_eager=['a']"),
            ("_private and last_", r"\_private and last\_"),
            ("__init__", r"\_\_init\_\_"),
            ("blocks[0](x)", r"blocks[0\](x)"),
            ("`a` \\ b*", r"\`a\` \\ b\*"),
            ("a & b < c", "a &amp; b &lt; c"),
        ],
    )
    def test_only_what_would_be_markup_is_escaped(self, text: str, escaped: str) -> None:
        assert f"- {escaped}\n" in dataclasses.replace(STEADY, notes=(text,)).to_markdown()

    def test_backticks_in_the_plan_do_not_end_its_block(self) -> None:
        page = dataclasses.replace(STEADY, plan="a ``` b").to_markdown()
        assert "````text\na ``` b\n````" in page

    def test_line_breaks_in_a_reason_do_not_break_the_table(self) -> None:
        report = dataclasses.replace(STEADY, decision="no:\n| too | few |\n\nsteps")
        assert r"| decision | no: \| too \| few \| steps |" in report.to_markdown()


class TestThePlan:
    def test_it_is_printed_when_it_is_asked_for_and_once(self) -> None:
        printed = []

        class Plan:
            def __str__(self) -> str:
                printed.append(1)
                return "plan: all of it"

        report = dataclasses.replace(BARE, plan=printed_later(Plan()))
        assert printed == []
        assert report.plan == report.to_dict()["plan"] == "plan: all of it"
        assert "all of it" in report.to_text()
        assert printed == [1]

    def test_copies_and_pickles(self) -> None:
        plan = plan_compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), scope="regions")
        report = dataclasses.replace(BARE, plan=printed_later(plan))
        assert pickle.loads(pickle.dumps(report)).plan == copy.deepcopy(report).plan == str(plan)
        assert report == dataclasses.replace(BARE, plan=str(plan))

    def test_it_has_to_be_given(self) -> None:
        given = {f.name: getattr(BARE, f.name) for f in dataclasses.fields(BARE) if f.name != "plan"}
        with pytest.raises(TypeError, match="plan"):
            Report(**given)
