"""Processes that are measured: whatever ends the wait for them, nothing of theirs goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.bench.runs import RunFailed, RunKilled, RunTimedOut, run_alone, run_in_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc who is alive")


def state(pid: int) -> str:
    """The letter that Linux has for a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def assert_ends(pid: int) -> None:
    """A process that was killed takes a moment to end."""
    patience = threading.Event()
    for _ in range(300):
        if state(pid) in ("", "Z"):
            return
        patience.wait(0.1)
    pytest.fail(f"process {pid} goes on in state {state(pid)}")


def send_once_written(process: subprocess.Popen[Any], number: signal.Signals, file: Path) -> None:
    """Send a signal to a process once it has written to the file, or has ended."""
    while process.poll() is None and not (file.exists() and file.read_text("utf-8").strip()):
        threading.Event().wait(0.05)
    process.send_signal(number)


def assert_signal_ends(command: list[str], number: signal.Signals, file: Path) -> None:
    """A signal ends a command, and the process whose number the command has written to the file."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        send_once_written(process, number, file)
        assert process.wait(timeout=60) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert_ends(int(file.read_text("utf-8")))


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """A command that starts another one and waits, and the file with the number of that."""
    file = tmp_path / "pid"
    yield ["sh", "-c", f"sleep 1000 & echo $! > {shlex.quote(str(file))}; wait"], file
    if file.exists() and state(int(file.read_text("utf-8"))) not in ("", "Z"):
        os.kill(int(file.read_text("utf-8")), signal.SIGKILL)


def test_what_it_prints_and_its_exit_code() -> None:
    out, err, code = run_alone(["sh", "-c", "echo a; echo b >&2; exit 3"], os.environ, 60)
    assert (out, err, code) == ("a\n", "b\n", 3)


def test_its_input_is_empty() -> None:
    assert run_alone(["cat"], os.environ, 60) == ("", "", 0)


def test_after_the_limit_nothing_that_it_has_started_goes_on(waiting: tuple[list[str], Path]) -> None:
    command, file = waiting
    with pytest.raises(RunTimedOut, match="it took more than 2 s"):
        run_alone(command, os.environ, 2.0)
    assert_ends(int(file.read_text("utf-8")))


def test_nothing_stays_behind_a_command_that_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    quiet = "> /dev/null 2>&1"
    run_alone(["sh", "-c", f"sleep 1000 {quiet} & echo $! > {shlex.quote(str(file))}"], os.environ, 60)
    assert_ends(int(file.read_text("utf-8")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_the_benchmark_ends_what_it_measures(
    number: signal.Signals, waiting: tuple[list[str], Path]
) -> None:
    command, file = waiting
    script = (
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lightning_hotcompile.bench.recipe_errors import refusals_in_one_line\n"
        "from lightning_hotcompile.bench.runs import run_alone\n"
        f"with refusals_in_one_line(): run_alone({command!r}, os.environ, 500)"
    )
    assert_signal_ends([sys.executable, "-c", script], number, file)


@pytest.mark.parametrize(("number", "error"), [(2, KeyboardInterrupt), (15, SystemExit)])
def test_a_signal_between_the_start_of_a_process_and_its_number(
    number: int, error: type[BaseException], waiting: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, file = waiting

    class Slow(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            while not (file.exists() and file.read_text("utf-8").strip()):
                threading.Event().wait(0.01)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            run_alone(command, os.environ, 60)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert_ends(int(file.read_text("utf-8")))


def test_the_usual_answer_to_sigterm_is_there_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_alone(["true"], os.environ, 60)
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_can_be_waited_for_in_another_thread() -> None:
    found: list[tuple[str, str, int]] = []
    thread = threading.Thread(target=lambda: found.append(run_alone(["echo", "x"], os.environ, 60)))
    thread.start()
    thread.join()
    assert found == [("x\n", "", 0)]


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", RunKilled, "signal 9"),
        ("raise MemoryError('no room')", RunFailed, "MemoryError: no room"),
        (
            "raise type('LongError', (OSError,), {})('no room\\n\\nSet SOME=1')",
            RunFailed,
            "no room",
        ),
        ("print('no JSON')", RunFailed, "exit code 0"),
    ],
)
def test_a_process_that_fails_says_why(
    source: str, error: type[RunFailed], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(error, match=words):
        run_in_process("failing_module", [], tmp_path / "files", 1)
