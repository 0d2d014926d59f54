"""``python -m lightning_hotcompile.trace`` with real scripts, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.capture.summary import to_json
from lightning_hotcompile.view.run import load_run
from tests.cli.command import hotcompile
from tests.view.examples import captured, report

ROOT = Path(__file__).parents[2]

SCRIPT = f"""
import sys
import torch

sys.path.insert(0, {str(ROOT)!r})
torch.set_num_threads(1)
from tests.models import Net, fit, loader, seeded

print("training", sys.argv[1:])
fit(seeded(Net), max_epochs=int(sys.argv[1]), train=loader(96))
print("done", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def traced(*arguments: str, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_hotcompile.trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    return file


@pytest.mark.slow
def test_before_and_after_of_a_script_that_knows_nothing(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    done = traced("-n", "4", "--skip", "2", "--dir", str(before), "--", sys.executable, str(script), "1", "3")
    assert done.returncode == 3
    assert done.stdout == "training ['1', '3']\n"
    assert done.stderr.splitlines()[-2] == "done"
    assert done.stderr.splitlines()[-1].startswith(f"hotcompile: captured 4 steps into {before}: 0.0% of")
    assert sorted(p.name for p in before.iterdir()) == ["summary.json", "trace.json"]

    # Few steps of a tiny model: HotCompile declines, which is a decision too.
    done = traced("-n", "3", "--hotcompile", "--dir", str(after), "--", sys.executable, str(script), "3", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in after.iterdir()) == [
        "events.jsonl",
        "report.json",
        "summary.json",
        "trace.json",
    ]
    run = load_run(after)
    assert run.problems == ()
    assert run.report is not None
    assert run.report.phase == "declined"
    assert run.captured is not None
    assert run.captured.profiled_steps == 3
    assert run.captured.command == (sys.executable, str(script), "3", "0")

    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    result = hotcompile("timeline", before, after, "-o", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_script_without_a_trainer_is_said_to_have_none(tmp_path: Path) -> None:
    done = traced(
        "--dir", str(tmp_path / "a"), "--", sys.executable, "-c", "print('hello'); raise SystemExit(5)"
    )
    assert (done.returncode, done.stdout) == (5, "hello\n")
    assert "nothing was captured" in done.stderr


@pytest.mark.parametrize("length", [None, 60, 0], ids=["whole", "cut off", "empty"])
def test_what_an_earlier_capture_left_is_gone_and_the_rest_stays(tmp_path: Path, length: int | None) -> None:
    """Its summary is made first: one that was killed leaves it empty, or cut off."""
    for name in ("trace.json", "report.json", "events.jsonl", "mine.txt"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "summary.json").write_text(to_json(captured())[:length], encoding="utf-8")
    done = traced("--dir", str(tmp_path), "--", sys.executable, "-c", "")
    assert done.returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["summary.json", "trace.json", "report.json", "events.jsonl"])
def test_what_another_run_left_is_refused_before_anything_is_started(tmp_path: Path, name: str) -> None:
    """The receipt of a training is not overwritten."""
    content = report().to_json()
    (tmp_path / name).write_text(content, encoding="utf-8")
    done = traced("--dir", str(tmp_path), "--", sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"hotcompile: error: {str(tmp_path / name)!r} is of no capture: give another --dir, or move that "
        "file away.\n"
    )
    assert (tmp_path / name).read_text(encoding="utf-8") == content


def test_the_child_gets_the_order_and_hotcompile(tmp_path: Path) -> None:
    code = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if 'HOTCOMPILE' in k}))"
    environment = {"PATH": "", "HOTCOMPILE": "off"}
    for extra, switch in (((), "off"), (("--hotcompile",), "auto")):
        done = traced("--dir", str(tmp_path), *extra, "--", sys.executable, "-c", code, env=environment)
        told = json.loads(done.stdout)
        assert told["HOTCOMPILE"] == switch
        assert ("HOTCOMPILE_EVENT_LOG" in told) is bool(extra)
        order = json.loads(told["HOTCOMPILE_CAPTURE"])
        assert (order["folder"], order["seconds"], order["steps"]) == (str(tmp_path), 5.0, None)


def test_a_signal_ends_the_script_and_is_its_exit_code(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\n"
        "signal.pause()"
    )
    command = [
        sys.executable,
        "-m",
        "lightning_hotcompile.trace",
        "--dir",
        str(tmp_path),
        "--",
        sys.executable,
    ]
    with subprocess.Popen(
        [*command, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 9
    killed = traced("--dir", str(tmp_path), "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 137


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-n", "3", "-s", "2"), "-s 2 and -n 3 contradict each other: give one of them."),
        (("-n", "0"), "-n 0 is not allowed"),
        (("-s", "0"), "-s 0 is not allowed"),
        (("-s", "nan"), "-s nan is not allowed"),
        (("--skip", "-1"), "--skip -1 is not allowed"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = traced(*arguments, "--dir", str(tmp_path), "--", sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hotcompile: error: {why}")


def test_a_command_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    done = traced("--dir", str(tmp_path), "--", "no-such-program", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("hotcompile: error: 'no-such-program' cannot be started (No such file")


def test_a_capture_that_was_cut_off_is_said_to_be(tmp_path: Path) -> None:
    code = (
        "import json, os, pathlib\n"
        "folder = json.loads(os.environ['HOTCOMPILE_CAPTURE'])['folder']\n"
        "pathlib.Path(folder, 'summary.json').write_text('{')"
    )
    done = traced("--dir", str(tmp_path), "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert "was cut off" in done.stderr
