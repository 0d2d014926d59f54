"""Processes that are forked from one which has imported everything: as separate as any other."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hotcompile.bench import forked, own_pages
from lightning_hotcompile.bench.forked import run_forked
from lightning_hotcompile.bench.runs import RunTimedOut
from tests.bench.test_runs import assert_ends, send_once_written

SOURCE = """
import os, subprocess, sys, tempfile

IMPORTED_IN = os.getpid()

def main():
    what = sys.argv[1]
    alone = os.getpid() == os.getsid(0)
    print(what, os.environ.get("MINE"), os.environ.get("ONCE"), tempfile.gettempdir(), alone)
    print("to stderr", file=sys.stderr)
    if what == "code":
        sys.exit(3)
    if what == "error":
        raise MemoryError("no room")
    if what == "dies":
        os.kill(os.getpid(), 9)
    if what == "reads":
        print(repr(sys.stdin.read()))
    if what == "waits":
        child = subprocess.Popen(["sleep", "1000"])
        with open(sys.argv[2], "w") as file:
            file.write(str(child.pid))
        child.wait()
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module that a forked process can import."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "forked_example.py").write_text(SOURCE, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield "forked_example"
    sys.path.remove(str(folder))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


def test_output_arguments_and_environment(module: str, tmp_path: Path) -> None:
    given = environment(MINE="yes", TMPDIR=str(tmp_path))
    out, err, code = run_forked(module, ["plain"], given, 60)
    assert (out, err, code) == (f"plain yes None {tmp_path} True\n", "to stderr\n", 0)


def test_one_process_knows_nothing_of_the_one_before(module: str) -> None:
    run_forked(module, ["first"], environment(ONCE="1"), 60)
    out, _, _ = run_forked(module, ["second"], environment(), 60)
    assert out.startswith("second None None ")


@pytest.mark.parametrize(("what", "expected"), [("code", 3), ("error", 1), ("dies", -9)])
def test_the_exit_code(module: str, what: str, expected: int) -> None:
    _, err, code = run_forked(module, [what], environment(), 60)
    assert code == expected
    assert ("MemoryError: no room" in err) is (what == "error")


def test_its_input_is_empty(module: str) -> None:
    out, _, _ = run_forked(module, ["reads"], environment(), 60)
    assert out.splitlines()[-1] == "''"


WRITES = """
import mmap, os, resource, sys
from lightning_hotcompile.bench.own_pages import make_pages_own
size, page = 32 << 20, mmap.PAGESIZE
held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, size, page):
    held[at] = 1
if os.fork() == 0:
    if sys.argv[1] == "own" and not make_pages_own():
        print(-1, flush=True)
        os._exit(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, size, page):
        held[at] = 2
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
os.wait()
"""


def faults(what: str) -> int:
    made = subprocess.run([sys.executable, "-c", WRITES, what], capture_output=True, text=True, check=True)
    return int(made.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux copies at once")
def test_pages_are_its_own_before_anything_is_measured() -> None:
    own, pages = faults("own"), (32 << 20) // resource.getpagesize()
    assert faults("shared") >= pages
    if own < 0:
        pytest.skip("before Linux 5.14")
    assert own < pages / 10


def test_a_system_that_cannot_copy_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own_pages, "_MAPS", tmp_path / "maps")
    assert own_pages.make_pages_own() is False
    nothing = "0000000000001000-0000000000002000 rw-p 00000000 00:00 0\nSize: 4 kB\nRss: 4 kB\n"
    (tmp_path / "maps").write_text(nothing, "ascii")
    assert own_pages.make_pages_own() is False  # nothing is mapped there


def test_after_the_limit_nothing_that_it_has_started_goes_on(module: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    run_forked(module, ["first"], environment(), 60)  # which imports
    with pytest.raises(RunTimedOut, match="it took more than 6 s"):
        run_forked(module, ["waits", str(file)], environment(), 6.0)
    assert_ends(int(file.read_text("utf-8")))


def test_who_ends_the_benchmark_ends_what_it_measures(module: str, tmp_path: Path) -> None:
    numbers, script = (signal.SIGTERM, signal.SIGINT), tmp_path / "script.py"
    files = [tmp_path / number.name for number in numbers]
    folder = next(p for p in sys.path if Path(p, f"{module}.py").exists())
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {folder!r})\n"
        "from lightning_hotcompile.bench.forked import run_forked\n"
        "from lightning_hotcompile.bench.recipe_errors import refusals_in_one_line\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    for file in {[str(file) for file in files]!r}:\n"
        "        try:\n"
        "            with refusals_in_one_line():\n"
        f"                run_forked({module!r}, ['waits', file], os.environ, 500)\n"
        "        except SystemExit as end:\n"
        "            print(end.code, flush=True)\n",
        encoding="utf-8",
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for number, file in zip(numbers, files, strict=True):
            send_once_written(process, number, file)
            assert process.stdout.readline() == f"{128 + number}\n"
            assert_ends(int(file.read_text("utf-8")))
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_without_forks_a_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_module.py").write_text("print('ran')", encoding="utf-8")
    monkeypatch.setattr(forked.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    out, _, code = run_forked("plain_module", [], environment(PYTHONPATH=shlex.quote(str(tmp_path))), 60)
    assert (out, code) == ("ran\n", 0)
