"""The commands report, events, timeline and trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hotcompile.capture.summary import to_json
from lightning_hotcompile.receipt.event_kinds import Planned
from lightning_hotcompile.receipt.events import describe
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.view.latex import report_to_latex
from tests.cli.command import as_json, hotcompile, in_a_process, refused
from tests.view.examples import TREE, captured, events, report, write_log, write_report

COMMANDS = ("report", "events", "timeline", "trace")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_report(tmp_path / "run")
    write_log(folder / "events.jsonl")
    return folder


def test_report_is_text_by_default(run: Path) -> None:
    result = hotcompile("report", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == report().to_text()


@pytest.mark.parametrize(
    ("form", "beginning"),
    [
        ("text", "───"),
        ("md", "## hotcompile receipt"),
        ("latex", r"\paragraph{hotcompile receipt}"),
        ("html", "<!DOCTYPE html>"),
        ("json", "{\n"),
    ],
)
def test_each_format_printed_and_written(form: str, beginning: str, run: Path, tmp_path: Path) -> None:
    printed = hotcompile("report", run, "--format", form).stdout
    assert printed.startswith(beginning)
    ending = {"text": "txt", "latex": "tex"}.get(form, form)
    result = hotcompile("report", run, "-o", tmp_path / f"x.{ending}")
    assert result.stdout == f"Wrote {tmp_path / f'x.{ending}'}.\n"
    assert (tmp_path / f"x.{ending}").read_text(encoding="utf-8") == printed


def test_json_is_that_of_the_report(run: Path) -> None:
    assert json.loads(hotcompile("report", run, "--format", "json").stdout) == report().to_dict()


def test_latex_stays_text(run: Path) -> None:
    source = report_to_latex(report(reason=r"a_b & 50% {x} \input{/etc} $y$ #1 ~ ^"))
    assert r"a\_b \& 50\% \{x\} \textbackslash{}input\{/etc\} \$y\$ \#1" in source
    assert source.count(r"\begin{tabular}") == source.count(r"\end{tabular}") == 3
    assert r"1.47x faster (98\% interval 1.38 to 1.55)" in source


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    wild = "a\x1b]0;title\x07\x1b[2J\ud800b"
    folder = write_report(tmp_path / "run", report(reason="x"))
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    record["notes"], record["events"][0]["signature"] = [wild], wild
    (folder / "report.json").write_text(json.dumps(record), encoding="utf-8")
    for arguments in (["report", folder], ["events", folder], ["report", folder, "--format", "html"]):
        shown = hotcompile(*arguments).stdout
        assert "\x1b" not in shown
        assert "title" in shown
    assert hotcompile("trace", folder, "-o", tmp_path / "t.json").exit_code == 0


def test_an_output_without_the_lines_of_trees_has_others_and_json_has_escapes(tmp_path: Path) -> None:
    tree = "plan\n└── compiled\n    └── Net.层"
    planned = replace(next(e for e in events() if isinstance(e, Planned)), tree=tree)
    log = str(write_log(tmp_path / "a.jsonl", [planned]))
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for command in (["events", log], ["report", log, "--format", "md"]):
        assert "+-- compiled" in in_a_process(*command, env=latin).stdout
    (found,) = json.loads(in_a_process("events", log, "--json", env=latin).stdout)["events"]
    assert found["tree"] == tree


def test_events_are_listed_with_time_and_plan(run: Path) -> None:
    lines = hotcompile("events", run).stdout.splitlines()
    assert lines[0] == f"     +0.000s  {describe(events()[0])}"
    assert len(lines) == len(events()) + len(TREE.splitlines())
    assert lines[2].strip() == TREE.splitlines()[0]
    since = events()[4].time - events()[0].time
    assert any(line.startswith(f"+{since:.3f}s".rjust(12) + "  step     11  COMPILED") for line in lines)


def test_events_of_another_stage_are_named(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.jsonl", [replace(events()[0], stage="validate")])
    assert hotcompile("events", file).stdout.endswith("[validate]\n")


def test_events_as_json(run: Path) -> None:
    found = as_json("events", run)
    assert [e["kind"] for e in found["events"]] == [e.kind for e in events()]


def test_no_events_are_said_to_be_none(tmp_path: Path) -> None:
    folder = write_report(tmp_path / "run", report(events=()))
    assert "Nothing happened" in hotcompile("events", folder).stdout


def test_broken_lines_are_named_and_hide_nothing(run: Path) -> None:
    log = run / "events.jsonl"
    whole = hotcompile("events", run).stdout
    log.write_text("{cut\n" + log.read_text(encoding="utf-8") + '{"kind": "comp', encoding="utf-8")
    result = hotcompile("events", run)
    assert (result.exit_code, result.stdout) == (0, whole)
    first, second = result.stderr.splitlines()
    assert first.startswith(f"hotcompile: warning: {log}, line 1: is not JSON")
    assert second.startswith(f"hotcompile: warning: {log}, line {len(events()) + 2}: is not JSON")


def test_many_broken_lines_are_not_a_flood(run: Path) -> None:
    with (run / "events.jsonl").open("a", encoding="utf-8") as log:
        log.write("x\n" * 500)
    result = hotcompile("report", run)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == "hotcompile: warning: 490 more problems of this kind"
    assert len(result.stderr.splitlines()) == 11


def test_trace_is_a_trace(run: Path, tmp_path: Path) -> None:
    assert hotcompile("trace", run, "-o", tmp_path / "t.json").exit_code == 0
    found = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert sum(r["name"] == "step_ms" for r in found["traceEvents"]) == 320


def test_timeline_of_one_and_of_two(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    other = tmp_path / "before"
    other.mkdir()
    (other / "summary.json").write_text(to_json(captured()), encoding="utf-8")
    for arguments in ((run,), (other, run)):
        output = tmp_path / f"{len(arguments)}.png"
        assert hotcompile("timeline", *arguments, "-o", output).exit_code == 0
        assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_matplotlib")
def test_a_missing_matplotlib_is_one_line(run: Path, tmp_path: Path) -> None:
    message = refused("timeline", run, "-o", tmp_path / "x.png")
    assert (
        "a timeline needs matplotlib, which is not installed: pip install 'lightning-hotcompile[recipes]'"
        in message
    )


@pytest.mark.parametrize("command", ["events", "report"])
def test_a_reader_that_has_seen_enough_is_told_no_error(command: str, run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "lightning_hotcompile", command, str(run)]
    try:
        done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(("command", "shown"), [("events", "-- Net.training_step"), ("report", "-" * 100)])
def test_an_output_that_is_not_utf_8_has_plain_lines(command: str, shown: str, run: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = in_a_process(command, str(run), env=environment, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_not_there(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "RUN='nowhere' is not there: name a folder" in refused(command, "nowhere")
    (tmp_path / "empty").mkdir()
    assert "RUN='empty' is an empty folder" in refused(command, "empty")
    (tmp_path / "broken.jsonl").write_text("{\n{\n", encoding="utf-8")
    assert "nothing of 'broken.jsonl' can be read: broken.jsonl, line 1:" in refused(command, "broken.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.jsonl", "empty"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("report", "RUN", "--format", "pdf"),
            "--format='pdf' is not allowed: use text, md, latex, html or json.",
        ),
        (("report", "RUN", "-o", "no/x.html"), "make the folder"),
        (("report", "RUN", "-o", "."), ". is a folder: name the file to write."),
        (("trace", "RUN", "-o", "no/x.json"), "make the folder"),
        (("timeline", "RUN", "-o", "x.pdf"), "-o 'x.pdf' is not allowed: the picture is a PNG"),
        (("timeline", "RUN", "-o", "no/x.png"), "make the folder"),
    ],
)
def test_what_cannot_be_written(
    arguments: tuple[str, ...], why: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in refused(*(str(run) if a == "RUN" else a for a in arguments))


def test_a_capture_has_no_receipt_but_a_page(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(to_json(captured()), encoding="utf-8")
    assert "is a capture without HotCompile, so it has no receipt" in refused("report", tmp_path)
    assert "python train.py" in hotcompile("report", tmp_path, "--format", "html").stdout


def test_the_headline_of_a_log_is_told(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.jsonl")
    shown = " ".join(hotcompile("report", file).stdout.split())
    assert headline(report()).partition(",")[0] in shown
