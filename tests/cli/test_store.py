"""``hotcompile store``: listing, clearing, exporting, importing, and every way to be refused."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from lightning_hotcompile.cli import store as commands
from lightning_hotcompile.cli.telling import CommandError, count_text, seconds_of, size_text, time_json
from lightning_hotcompile.store.store import Store
from tests.cli.command import as_json, hotcompile, in_a_process, refused
from tests.store.examples import MACHINE, path_of, profile, sample

DAY = 86_400
CODE = 2_000_000


def made(folder: Path, *, code: bool = True) -> Store:
    """A store with two verdicts, compile times of one machine and 2 MB of compiled code."""
    store = Store(folder)
    store.remember(profile("p1"))
    store.remember(profile("p2"))
    store.add_compile_sample(sample())
    if code:
        entry = store.compiler_cache_dir / "ab" / "abcd.cpp"
        entry.parent.mkdir()
        entry.write_bytes(b"x" * CODE)
    return store


def files(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


def make_old(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


class TestList:
    def test_each_entry_has_a_line_and_there_is_a_total(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        result = hotcompile("store", "ls", "--folder", tmp_path / "s")
        assert result.exit_code == 0
        assert f"Store: {tmp_path / 's'}" in result.stdout
        for part in ("verdict", "compile times", "compiled code", "2.0 MB", "4 entries", "total"):
            assert part in result.stdout
        assert result.stdout.count("good, 1.30x, scope step, 1 run") == 2
        assert time.strftime("%Y-%m-") in result.stdout

    def test_json_has_the_same(self, tmp_path: Path) -> None:
        store = made(tmp_path / "s")
        found = as_json("store", "ls", "--folder", tmp_path / "s")
        assert found["folder"] == str(tmp_path / "s")
        assert [e["kind"] for e in found["entries"]] == ["profile", "profile", "samples", "compiler"]
        assert found["entries"][3]["bytes"] == CODE
        assert found["bytes"] == sum(e["bytes"] for e in found["entries"]) == sum(r.size for r in store.ls())
        assert found["entries"][0]["used"] == time_json(store.ls()[0].used)

    @pytest.mark.parametrize("there", [False, True])
    def test_an_empty_store_says_so(
        self, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "s"
        monkeypatch.setenv("HOTCOMPILE_STORE", str(folder))
        if there:
            assert Store(folder).compiler_cache_dir.is_dir()  # an empty folder is nothing to list
        result = hotcompile("store", "ls")
        assert (result.exit_code, result.stdout) == (0, f"The store {folder} is empty.\n")
        assert as_json("store", "ls") == {"folder": str(folder), "bytes": 0, "entries": []}
        assert folder.exists() == there  # to look at it does not make it

    def test_what_is_written_in_a_name_is_no_markup_and_no_escape(self, tmp_path: Path) -> None:
        store = made(tmp_path / "s", code=False)
        path = path_of(store, profile("p1").key)
        path.write_text(path.read_text(encoding="utf-8").replace('"step"', '"[red]"'), encoding="utf-8")
        assert "[red]" in hotcompile("store", "ls", "--folder", tmp_path / "s").stdout

    def test_a_file_that_cannot_be_read_has_a_line_too(self, tmp_path: Path) -> None:
        store = made(tmp_path / "s", code=False)
        path_of(store, profile("p1").key).write_text("{", encoding="utf-8")
        assert "not readable" in hotcompile("store", "ls", "--folder", tmp_path / "s").stdout


class TestClear:
    def test_yes_removes_all(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        result = hotcompile("store", "clear", "--folder", tmp_path / "s", "--yes")
        assert result.exit_code == 0
        assert "Removed 2.0 MB" in result.stdout
        assert "stays" not in result.stdout
        assert files(tmp_path / "s") == set()
        assert "empty" in hotcompile("store", "ls", "--folder", tmp_path / "s").stdout

    @pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
    def test_it_asks(self, answer: str, gone: bool, tmp_path: Path) -> None:
        made(tmp_path / "s")
        result = hotcompile("store", "clear", "--folder", tmp_path / "s", answer=answer)
        assert f"Forget all of {tmp_path / 's'} (2.0 MB in all)?" in result.stdout
        assert result.exit_code == (0 if gone else 1)
        assert ("Nothing was removed." in result.stdout) == (not gone)
        assert (not files(tmp_path / "s")) == gone

    def test_nobody_to_ask_removes_nothing(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        result = hotcompile("store", "clear", "--folder", tmp_path / "s")
        assert result.exit_code == 2
        assert "give --yes" in result.stderr
        assert len(files(tmp_path / "s")) == 4

    def test_only_what_was_not_used_for_so_long(self, tmp_path: Path) -> None:
        store = made(tmp_path / "s")
        make_old(tmp_path / "s", days=31)
        kept = path_of(store, profile("p2").key)
        os.utime(kept)
        arguments = ("store", "clear", "--folder", tmp_path / "s", "--older-than")
        assert "what was not used for 30d" in hotcompile(*arguments, "30d", answer="n\n").stdout
        assert hotcompile(*arguments, "5w", "--yes").exit_code == 0
        assert len(files(tmp_path / "s")) == 4
        assert hotcompile(*arguments, "30d", "--yes").exit_code == 0
        assert files(tmp_path / "s") == {kept.relative_to(tmp_path / "s")}

    def test_what_a_run_under_way_may_use_stays_and_that_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(
            "TORCHINDUCTOR_CACHE_DIR", raising=False
        )  # a run keeps its code there, if it is set
        store = made(tmp_path / "s")
        make_old(store.compiler_cache_dir, days=1)
        entry = store.compiler_cache_dir / "ab" / "abcd.cpp"
        with store.use_compiler_cache() as use:
            assert use.active, use.reason
            os.utime(entry)
            result = hotcompile("store", "clear", "--folder", tmp_path / "s", "--yes")
        assert result.exit_code == 0
        assert "2.0 MB of compiled code stays: a run that is under way" in result.stdout
        assert entry.exists()
        assert "stays" not in hotcompile("store", "clear", "--folder", tmp_path / "s", "--yes").stdout
        assert not entry.exists()

    def test_an_empty_store_is_not_asked_about(self, tmp_path: Path) -> None:
        Store(tmp_path / "s")
        result = hotcompile("store", "clear", "--folder", tmp_path / "s")
        assert result.exit_code == 0
        assert "empty" in result.stdout

    def test_a_lock_that_is_held_is_told(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        with FileLock(tmp_path / "s" / "records.lock"):
            assert "is locked" in refused("store", "clear", "--folder", tmp_path / "s", "--yes")

    @pytest.mark.parametrize("duration", ["30", "d", "-1d", "1y", "1d 2h", "", "nan d", "1e3d"])
    def test_a_wrong_duration(self, duration: str, tmp_path: Path) -> None:
        made(tmp_path / "s")
        line = refused("store", "clear", "--folder", tmp_path / "s", f"--older-than={duration}", "--yes")
        assert f"--older-than={duration!r}" in line
        assert "such as 30d" in line
        assert len(files(tmp_path / "s")) == 4


class TestCarry:
    @pytest.mark.parametrize("name", ["a.tar", "a b.tar.gz"])
    def test_there_and_back(self, name: str, tmp_path: Path) -> None:
        made(tmp_path / "s")
        archive = tmp_path / name
        result = hotcompile("store", "export", archive, "--folder", tmp_path / "s")
        assert result.exit_code == 0
        digest = result.stdout.split("SHA-256: ")[1].split()[0]
        quoted = "'a b.tar.gz'" if " " in name else name
        assert f"hotcompile store import {quoted} --sha256 {digest}" in result.stdout
        result = hotcompile("store", "import", archive, "--folder", tmp_path / "t", "--sha256", digest)
        assert result.exit_code == 0
        assert "2 verdicts, compile times of 1 machine, 1 file of compiled code." in result.stdout
        assert result.stderr == ""
        assert files(tmp_path / "t") == files(tmp_path / "s")

    def test_without_its_hash_code_is_taken_with_a_note(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        hotcompile("store", "export", tmp_path / "a.tar", "--folder", tmp_path / "s")
        result = hotcompile("store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t")
        assert result.exit_code == 0
        assert "--sha256" in result.stderr

    @pytest.mark.parametrize("side", ["export", "import"])
    def test_the_compilers_cache_can_stay_behind(self, side: str, tmp_path: Path) -> None:
        made(tmp_path / "s")
        for one, folder in (("export", "s"), ("import", "t")):
            options = ["--no-compiler-cache"] if one == side else []
            result = hotcompile("store", one, tmp_path / "a.tar", "--folder", tmp_path / folder, *options)
            assert result.exit_code == 0
        assert "0 files of compiled code" in result.stdout
        assert result.stderr == ""
        assert len(files(tmp_path / "t")) == 3

    def test_what_was_left_out_is_told(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "s", machine=MACHINE)
        store.remember(profile())
        code = store.compiler_cache_dir / "ab" / "abcd.cpp"
        code.parent.mkdir()
        code.write_bytes(b"x")
        store.export(tmp_path / "a.tar")
        result = hotcompile("store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t")
        assert result.exit_code == 0
        assert "1 verdict," in result.stdout
        assert "Left out: 1 files of compiled code of another machine, PyTorch or Python" in result.stdout

    def test_what_an_export_leaves_out_is_told(self, tmp_path: Path) -> None:
        store = made(tmp_path / "s", code=False)
        code = Store(tmp_path / "s", machine=MACHINE).compiler_cache_dir / "ab" / "abcd.cpp"
        code.parent.mkdir()
        code.write_bytes(b"x" * CODE)
        result = hotcompile("store", "export", tmp_path / "a.tar", "--folder", store.folder)
        assert result.exit_code == 0
        assert "Left out: 2.0 MB of compiled code that is not known to be of this machine" in result.stdout
        options = ("--folder", store.folder, "--no-compiler-cache")
        assert "Left out" not in hotcompile("store", "export", tmp_path / "b.tar", *options).stdout

    def test_a_warning_of_the_store_is_one_line(self, tmp_path: Path) -> None:
        made(tmp_path / "s", code=False).export(tmp_path / "a.tar")
        there = made(tmp_path / "t", code=False)
        path_of(there, profile("p1").key).write_text("{", encoding="utf-8")
        result = hotcompile("store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t")
        assert result.exit_code == 0
        assert result.stderr.startswith("hotcompile: warning: ")
        assert len(result.stderr.splitlines()) == 1

    def test_export_replaces_no_file(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        (tmp_path / "a.tar").write_text("mine")
        line = refused("store", "export", tmp_path / "a.tar", "--folder", tmp_path / "s")
        assert str(tmp_path / "a.tar") in line
        assert "name another file" in line
        assert (tmp_path / "a.tar").read_text() == "mine"

    def test_export_into_no_folder(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        line = refused("store", "export", tmp_path / "no" / "a.tar", "--folder", tmp_path / "s")
        assert f"make the folder {tmp_path / 'no'} first" in line

    @pytest.mark.parametrize("there", [False, True])
    def test_an_empty_store_is_not_exported(
        self, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "s"))
        if there:
            Store(tmp_path / "s")
        assert f"the store {tmp_path / 's'} is empty" in refused("store", "export", tmp_path / "a.tar")
        assert not (tmp_path / "a.tar").exists()

    def test_import_of_no_file(self, tmp_path: Path) -> None:
        line = refused("store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t")
        assert f"{tmp_path / 'a.tar'} is no file: name the archive" in line
        assert not (tmp_path / "t").exists()

    def test_import_of_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_text("no archive")
        line = refused("store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t")
        assert "no readable archive" in line
        assert files(tmp_path / "t") == set()

    @pytest.mark.parametrize("digest", ["abc", "z" * 64, ""])
    def test_a_wrong_form_of_hash(self, digest: str, tmp_path: Path) -> None:
        made(tmp_path / "s", code=False).export(tmp_path / "a.tar")
        line = refused("store", "import", tmp_path / "a.tar", f"--sha256={digest}")
        assert f"--sha256={digest!r}" in line
        assert "64 digits" in line

    def test_another_hash(self, tmp_path: Path) -> None:
        made(tmp_path / "s", code=False).export(tmp_path / "a.tar")
        line = refused(
            "store", "import", tmp_path / "a.tar", "--folder", tmp_path / "t", "--sha256", "0" * 64
        )
        assert "expected is 000" in line
        assert files(tmp_path / "t") == set()


COMMANDS = [("ls",), ("clear", "--yes"), ("export", "a.tar"), ("import", "b.tar")]


class TestFolder:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(tmp_path / "of b", code=False).export(tmp_path / "b.tar")
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("command", COMMANDS, ids=str)
    def test_one_that_holds_something_else(self, command: tuple[str, ...], tmp_path: Path) -> None:
        other = tmp_path / "work" / "compiler" / "mine.cpp"
        other.parent.mkdir(parents=True)
        other.write_text("mine")
        line = refused("store", *command, "--folder", tmp_path / "work")
        assert f"{tmp_path / 'work'} is no store: it holds 'compiler'" in line
        assert other.read_text() == "mine"
        assert files(tmp_path / "work") == {Path("compiler/mine.cpp")}

    @pytest.mark.parametrize("command", COMMANDS[:3], ids=str)
    def test_one_that_is_not_there(self, command: tuple[str, ...], tmp_path: Path) -> None:
        line = refused("store", *command, "--folder", tmp_path / "no")
        assert f"--folder={str(tmp_path / 'no')!r} is not there: name" in line
        assert not (tmp_path / "no").exists()

    @pytest.mark.parametrize("command", COMMANDS, ids=str)
    def test_a_file(self, command: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        assert "it is not a folder" in refused("store", *command, "--folder", tmp_path / "file")

    @pytest.mark.skipif(sys.platform == "win32", reason="rights of POSIX")
    @pytest.mark.parametrize("command", COMMANDS, ids=str)
    def test_one_that_others_can_write_to(self, command: tuple[str, ...], tmp_path: Path) -> None:
        made(tmp_path / "s")
        (tmp_path / "s").chmod(0o777)
        assert "chmod 700" in refused("store", *command, "--folder", tmp_path / "s")

    def test_the_variable_names_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(tmp_path / "s")
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "s"))
        assert f"Store: {tmp_path / 's'}" in hotcompile("store", "ls").stdout

    def test_a_relative_one_is_shown_in_full(self, tmp_path: Path) -> None:
        made(tmp_path / "s")
        assert as_json("store", "ls", "--folder", "s")["folder"] == str(tmp_path / "s")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), (" 30D ", 30 * DAY), ("2w", 14 * DAY)]
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, "--older-than") == seconds


def test_a_wrong_duration_names_the_option() -> None:
    with pytest.raises(CommandError, match="--since='soon'"):
        seconds_of("soon", "--since")


def test_counts_and_sizes() -> None:
    assert [count_text(n, "file") for n in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
    assert [size_text(n) for n in (1, 999, 3_400_000)] == ["1 byte", "999 bytes", "3.4 MB"]


def test_every_kind_of_row_has_a_name(tmp_path: Path) -> None:
    assert {row.kind for row in made(tmp_path / "s").ls()} == set(commands.KINDS)


@pytest.mark.slow
def test_as_a_user_calls_it(tmp_path: Path) -> None:
    made(tmp_path / "s")
    done = in_a_process("store", "ls", "--json", "--folder", str(tmp_path / "s"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["entries"]) == 4
    done = in_a_process("store", "import", str(tmp_path / "no.tar"), "--folder", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
