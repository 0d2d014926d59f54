"""The page in a real browser: it renders, shows the numbers, and the console has nothing to say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_hotcompile.view.page import run_to_html
from lightning_hotcompile.view.run import Run, load_run
from tests.view.examples import HOSTILE, events, hostile_report, report, samples, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium"),
]


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """What the browser writes to stdout, and what the page told its console."""
    assert BROWSER is not None
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    own = (f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=2000")
    logging = ("--enable-logging=stderr", "--v=0")
    command = [BROWSER, *fixed, *own, *logging, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def written(folder: Path, run: Run) -> Path:
    file = folder / "report.html"
    file.write_text(run_to_html(run), encoding="utf-8")
    return file


def test_it_renders_with_its_numbers_and_marks(tmp_path: Path) -> None:
    page = written(tmp_path, Run(name="outputs/a", report=report(), events=tuple(events())))
    dom, console = browse(page, "--dump-dom")
    assert console == []
    assert len(re.findall(r'<circle class="step ', dom)) == len(samples()) - 1
    assert len(re.findall(r'<path class="stall"', dom)) == 1
    assert len(re.findall(r'<rect class="band"', dom)) == 4
    for part in ("1.47x faster", "98% interval 1.38 to 1.55", "step 11 stalled: 3.20 s", "2.90 s", "0.21 s"):
        assert part in dom


def test_the_console_would_be_heard(tmp_path: Path) -> None:
    page = tmp_path / "loud.html"
    page.write_text("<script>console.error('heard')</script>", encoding="utf-8")
    _, console = browse(page, "--dump-dom")
    assert any("heard" in line for line in console)


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    run = load_run(write_report(tmp_path / "run", hostile_report()))
    dom, console = browse(
        written(tmp_path, Run(name=HOSTILE, report=run.report, events=run.events)), "--dump-dom"
    )
    assert console == []  # a script that was there would be told to break the page's policy
    assert "<script" not in dom
    assert "<img" not in dom
    assert "&lt;script&gt;alert('x')&lt;/script&gt;" in dom


def test_it_can_be_drawn(tmp_path: Path) -> None:
    page = written(tmp_path, Run(name="outputs/a", report=report(), events=tuple(events())))
    browse(page, f"--screenshot={tmp_path / 'x.png'}", "--window-size=1200,2000")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.png").stat().st_size > 50_000
