"""``hotcompile doctor``: what it prints, and how it gathers the facts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_hotcompile.cli import compiler_trial, doctor, gathering
from lightning_hotcompile.cli.checks import all_checks
from lightning_hotcompile.cli.compiler_trial import cpp_compiler, why_failed, why_no_openmp
from lightning_hotcompile.cli.facts import Facts, Gpu
from lightning_hotcompile.store import folder
from tests.cli.command import as_json, hotcompile, in_a_process
from tests.cli.examples import facts

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="scripts and rights of POSIX")


def on(monkeypatch: pytest.MonkeyPatch, machine: Facts) -> None:
    monkeypatch.setattr(doctor, "facts_of_this_machine", lambda: machine)


class TestCommand:
    def test_all_is_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, facts())
        result = hotcompile("doctor")
        assert result.exit_code == 0
        assert result.stdout.endswith("No problem found.\n")
        assert "To do" not in result.stdout
        for part in ("Python 3.12.4", "torch 2.13.0+cpu", "/usr/bin/g++, builds OpenMP", "8 cores"):
            assert part in result.stdout

    def test_a_warning_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, facts(store_mode=0o755))
        result = hotcompile("doctor")
        assert result.exit_code == 0
        assert "To do: chmod 700 /home/a/store" in result.stdout
        assert result.stdout.endswith("0 problems, 1 warning.\n")

    def test_a_problem_is_exit_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, facts(lightning=None, header_found=False, store_mode=0o755))
        result = hotcompile("doctor")
        assert result.exit_code == 1
        assert result.stdout.endswith("2 problems, 1 warning.\n")
        assert "python3.12-dev" in result.stdout

    def test_json_has_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = facts(lightning=None)
        on(monkeypatch, machine)
        found = as_json("doctor")
        assert hotcompile("doctor", "--json").exit_code == 1
        assert (found["problems"], found["warnings"]) == (1, 0)
        for check, told in zip(all_checks(machine), found["checks"], strict=True):
            assert told == vars(check)

    def test_brackets_are_no_markup(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, facts(openmp_error="[bold]cannot find -lgomp[/]"))
        assert "[bold]cannot find -lgomp[/]" in hotcompile("doctor").stdout


def script(folder: Path, text: str) -> str:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)


class TestCompiler:
    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which(cpp_compiler()) is None, reason="no C++ compiler")
    def test_the_real_one_builds_openmp_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler_trial.tempfile, "tempdir", str(tmp_path))
        assert why_no_openmp(cpp_compiler(), timeout=120) is None
        assert list(tmp_path.iterdir()) == []

    @posix_only
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (
                "echo one; echo 'a.cpp:2: fatal error: omp.h: no' >&2; echo end; exit 1",
                "a.cpp:2: fatal error",
            ),
            ("echo first; echo last; exit 1", "last"),
            ("exit 3", "exit code 3"),
            ("exit 0", "it wrote nothing"),
        ],
    )
    def test_one_that_fails_says_why(self, text: str, reason: str, tmp_path: Path) -> None:
        assert reason in (why_no_openmp(script(tmp_path, text), timeout=60) or "")

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        assert str(tmp_path / "no") in (why_no_openmp(str(tmp_path / "no"), timeout=60) or "")

    @posix_only
    def test_one_that_hangs_is_left_also_if_a_child_of_it_stays(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        held = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        try:
            assert (
                why_failed([script(tmp_path, f"cat {pipe} &\nwait")], timeout=0.2)
                == "no end after 0.2 seconds"
            )
        finally:  # the child reads the pipe's end and goes, or no longer finds the pipe
            pipe.unlink()
            os.close(held)

    def test_cxx_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "my-c++")
        assert cpp_compiler() == "my-c++"

    @pytest.mark.parametrize(("system", "name"), [("linux", "g++"), ("darwin", "clang++"), ("win32", "cl")])
    def test_else_it_is_the_usual_one(self, system: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(compiler_trial.sys, "platform", system)
        assert cpp_compiler() == name


class TestStore:
    def test_one_that_is_not_there_yet_is_not_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "a" / "b"))
        found = gathering.store_facts()
        assert found["store"] == str(tmp_path / "a" / "b")
        assert (found["store_refused"], found["store_mode"]) == (None, None)
        assert found["store_free"] > 0
        assert list(tmp_path.iterdir()) == []

    @posix_only
    def test_its_rights_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path))
        tmp_path.chmod(0o750)
        assert gathering.store_facts()["store_mode"] == 0o750
        tmp_path.chmod(0o777)
        assert "chmod 700" in gathering.store_facts()["store_refused"]

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert gathering.why_no_store(tmp_path / "file") == "it is not a folder"
        assert (
            gathering.why_no_store(tmp_path / "file" / "s")
            == f"it cannot be made: {tmp_path / 'file'} is a file"
        )

    def test_no_right_to_write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gathering.os, "access", lambda path, mode: False)  # root may always
        assert "may not write to it" in (gathering.why_no_store(tmp_path) or "")
        assert f"may not write to {tmp_path}" in (gathering.why_no_store(tmp_path / "s") or "")

    @posix_only
    def test_one_that_is_not_there_in_a_folder_that_all_can_write_to(self, tmp_path: Path) -> None:
        shared = tmp_path / "scratch"
        shared.mkdir()
        shared.chmod(0o777)
        assert "others can replace it" in (gathering.why_no_store(shared / "me" / "store") or "")
        shared.chmod(0o1777)  # sticky
        assert gathering.why_no_store(shared / "me" / "store") is None

    def test_no_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOTCOMPILE_STORE", raising=False)
        monkeypatch.setattr(folder.platformdirs, "user_cache_path", lambda *a, **k: Path("~x/.cache"))
        found = gathering.store_facts()
        assert found["store"] is None
        assert "no home folder" in found["store_refused"]

    def test_the_nearest_folder_that_is_there(self, tmp_path: Path) -> None:
        assert gathering.nearest(tmp_path / "a" / "b") == tmp_path
        assert gathering.nearest(tmp_path) == tmp_path


class TestCache:
    @posix_only
    @pytest.mark.parametrize("noexec", [False, True])
    def test_whether_its_disk_runs_code(
        self, noexec: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flag = os.ST_NOEXEC if noexec else 0
        monkeypatch.setattr(gathering.os, "statvfs", lambda path: SimpleNamespace(f_flag=flag | os.ST_RDONLY))
        assert gathering.runs_code(tmp_path / "not there yet") is not noexec

    def test_a_system_that_does_not_say(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(gathering.os, "statvfs", raising=False)
        assert gathering.runs_code(tmp_path) is True

    def test_it_is_where_the_user_wants_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "s"))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        found = gathering.cache_facts()
        assert (found["cache"], found["cache_option"]) == (str(tmp_path / "s"), "HOTCOMPILE_STORE")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "c"))
        found = gathering.cache_facts()
        assert (found["cache"], found["cache_option"]) == (str(tmp_path / "c"), "TORCHINDUCTOR_CACHE_DIR")


class TestTorch:
    def test_without_it_there_are_findings_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        found = {c.name: c for c in all_checks(gathering.facts_of_this_machine())}
        assert found["PyTorch"].status == "problem"
        assert "not importable" in found["PyTorch"].found
        assert {found[name].status for name in ("CUDA", "compiler's cache")} == {"ok"}

    def test_an_old_one_without_what_we_use_is_a_finding_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "__version__", "2.4.1")
        monkeypatch.delattr(torch, "accelerator")
        monkeypatch.setitem(sys.modules, "torch._inductor.runtime.cache_dir_utils", None)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "folder"))
        found = {c.name: c for c in all_checks(gathering.facts_of_this_machine())}
        assert found["PyTorch"].status == "problem"
        assert "2.4.1" in found["PyTorch"].found

    def test_a_python_that_it_refuses(self) -> None:
        def refuses(function: object, backend: str) -> None:
            raise RuntimeError("Python 3.99 is not supported")

        assert gathering.why_no_compile(SimpleNamespace(compile=refuses)) == "Python 3.99 is not supported"
        assert gathering.why_no_compile(torch) is None

    def test_its_devices(self) -> None:
        def fake(available: bool, capability: object) -> SimpleNamespace:
            cuda = SimpleNamespace(
                is_available=lambda: available,
                device_count=lambda: 2,
                get_device_name=lambda i: f"G{i}",
                get_device_capability=capability,
            )
            return SimpleNamespace(cuda=cuda)

        def broken(index: int) -> tuple[int, int]:
            raise RuntimeError("CUDA error")

        two = (Gpu(name="G0", capability=(8, 0)), Gpu(name="G1", capability=(8, 1)))
        assert gathering.gpus_of(fake(True, lambda i: (8, i))) == two
        assert gathering.gpus_of(fake(False, lambda i: (8, i))) == ()
        assert gathering.gpus_of(fake(True, broken)) == ()

    def test_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
        assert gathering.why_no_triton() is None
        monkeypatch.setitem(sys.modules, "triton", None)
        assert "triton" in (gathering.why_no_triton() or "")


class TestTransformerEngine:
    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gathering, "version_of", lambda name: None)
        monkeypatch.setattr(
            gathering, "why_failed", lambda command, timeout: pytest.fail("nothing to import")
        )
        assert set(gathering.transformer_engine_facts().values()) == {None}

    def test_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gathering, "version_of", lambda name: "2.20")
        monkeypatch.setattr(gathering, "why_failed", lambda command, timeout: f"no {command[-1]}")
        assert gathering.transformer_engine_facts() == {
            "transformer_engine": "2.20",
            "transformer_engine_error": "no import torch, transformer_engine.pytorch",
        }


def test_a_distribution_that_is_not_there_has_no_version() -> None:
    assert gathering.version_of("no-such-distribution-here") is None
    assert gathering.version_of("pytest") == pytest.__version__


@pytest.mark.slow
def test_as_a_user_calls_it(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        **os.environ,
        "HOTCOMPILE_STORE": str(tmp_path / "s"),
        "TMPDIR": str(temporary),
        "CXX": "no-such-compiler",
    }
    done = in_a_process("doctor", "--json", env=environment)
    assert done.returncode == 1, done.stderr
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["C++ compiler"]["status"] == "problem"
    assert "'no-such-compiler' is not there" in checks["C++ compiler"]["found"]
    assert checks["PyTorch"]["found"] == f"torch {torch.__version__}"
    assert checks["store"]["status"] == "ok"
    assert not (tmp_path / "s").exists()
    assert [p for p in temporary.rglob("*") if p.is_file()] == []
