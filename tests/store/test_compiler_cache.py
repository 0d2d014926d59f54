"""Pointing the compiler at a folder, when that is left out, and undoing it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.codecache as codecache
from filelock import BaseFileLock, FileLock, SoftFileLock

from lightning_hotcompile.store import compiler_cache
from lightning_hotcompile.store.compiler_cache import running_since
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from tests.store.examples import MACHINE, NOW, store_in

FOLDER, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    before = codecache._HEADER_DIR
    yield
    assert before == codecache._HEADER_DIR


class TestOn:
    def test_all_paths_lead_into_the_store_and_back(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        use = store.use_compiler_cache()
        assert (use.active, FOLDER in os.environ) == (False, False)
        with use:
            assert (use.active, use.reason) == (True, "")
            assert os.environ[FOLDER] == str(store.compiler_cache_dir)
            assert Path(codecache._HEADER_DIR).parent == store.compiler_cache_dir
            assert Path(codecache._HEADER_LOCK_DIR).parent == Path(codecache._HEADER_DIR)
            assert Path(codecache.cache_dir()) == store.compiler_cache_dir
        assert (use.active, FOLDER in os.environ) == (False, False)

    @pytest.mark.parametrize("first_ends_first", [True, False])
    def test_two_trainings_of_a_process_use_it_until_the_last_one_is_done(
        self, tmp_path: Path, first_ends_first: bool
    ) -> None:
        before = codecache._HEADER_DIR
        store = store_in(tmp_path)
        uses = [store.use_compiler_cache().start() for _ in range(2)]
        assert [use.active for use in uses] == [True, True]
        assert len(list((tmp_path / "store" / "users").iterdir())) == 2
        first, last = uses if first_ends_first else reversed(uses)
        first.stop()
        assert os.environ[FOLDER] == str(store.compiler_cache_dir)
        assert Path(codecache._HEADER_DIR).parent == store.compiler_cache_dir
        last.stop()
        assert (FOLDER in os.environ, codecache._HEADER_DIR) == (False, before)

    def test_twice_is_once(self, tmp_path: Path) -> None:
        use = store_in(tmp_path).use_compiler_cache()
        use.start().start()
        use.stop()
        use.stop()
        assert FOLDER not in os.environ
        with use:
            assert use.active
        assert list((tmp_path / "store" / "users").iterdir()) == []

    def test_torchs_own_default_is_no_choice_and_comes_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        default = inductor_paths.default_folder()
        monkeypatch.setenv(FOLDER, default)
        monkeypatch.setenv(TRITON, f"{default}/triton/0")
        with store_in(tmp_path).use_compiler_cache() as use:
            assert use.active
            assert TRITON not in os.environ
            os.environ[TRITON] = f"{os.environ[FOLDER]}/triton/0"  # as torch does at the first kernel
        assert (os.environ[FOLDER], os.environ[TRITON]) == (default, f"{default}/triton/0")

    def test_tritons_folder_of_the_user_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TRITON, str(tmp_path))
        with store_in(tmp_path).use_compiler_cache():
            assert os.environ[TRITON] == str(tmp_path)
        assert os.environ[TRITON] == str(tmp_path)

    def test_what_was_set_meanwhile_stays(self, tmp_path: Path) -> None:
        with store_in(tmp_path).use_compiler_cache():
            os.environ[FOLDER] = "/of/the/user"
        assert os.environ[FOLDER] == "/of/the/user"

    def test_paths_that_torch_remembers_are_forgotten_at_both_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cleared: list[int] = []

        class Remembered:
            def cache_clear(self) -> None:
                cleared.append(1)

        monkeypatch.setattr(codecache, "_precompile_header", Remembered())
        with store_in(tmp_path).use_compiler_cache():
            assert len(cleared) == 1
        assert len(cleared) == 2

    def test_a_torch_without_these_names_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inductor_paths, "_codecache", lambda: object())
        with store_in(tmp_path).use_compiler_cache() as use:
            assert use.active

    def test_the_next_use_of_a_file_will_be_seen(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        files = [store.compiler_cache_dir / "ab" / "ca.so"]
        files.append(store.compiler_cache_dir / "precompiled_headers" / "h.h.gch")
        for file in files:
            file.parent.mkdir()
            file.write_bytes(Path(torch._C.__file__).read_bytes())  # a whole library is looked into
            os.utime(file, (100, 50))
        with store.use_compiler_cache():
            kernel, header = (f.stat() for f in files)
        assert (kernel.st_atime, kernel.st_mtime) == (100, 50)
        assert kernel.st_ctime > 100, "an access after this is written down"
        assert header.st_mtime > 100


class TestOff:
    def reason(self, tmp_path: Path) -> str:
        with store_in(tmp_path).use_compiler_cache() as use:
            assert not use.active
            assert list((tmp_path / "store").glob("users/*")) == []
        return use.reason

    def test_where_the_user_has_chosen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FOLDER, str(tmp_path))
        assert self.reason(tmp_path) == (
            f"TORCHINDUCTOR_CACHE_DIR={tmp_path} is set, so the compiler's cache stays there"
        )
        assert os.environ[FOLDER] == str(tmp_path)

    def test_inside_of_another_use(self, tmp_path: Path) -> None:
        with store_in(tmp_path / "outer").use_compiler_cache():
            assert "is set" in self.reason(tmp_path)
            assert "outer" in os.environ[FOLDER]

    def test_where_no_code_can_be_loaded_from(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiler_cache, "is_mounted", lambda folder, flag: flag == "ST_NOEXEC")
        assert "noexec" in self.reason(tmp_path)

    @pytest.mark.parametrize("name", ["a b", "it's", "a\tb"])
    def test_where_torch_cannot_name_it_to_the_cpp_compiler(self, name: str, tmp_path: Path) -> None:
        use = store_in(tmp_path / name, on_cpu=True).use_compiler_cache()
        assert not use.start().active
        assert "C++ compiler" in use.reason
        assert FOLDER not in os.environ
        with store_in(tmp_path / name).use_compiler_cache() as on_gpu:  # Triton takes it as it is
            assert on_gpu.active

    def test_other_letters_are_no_reason(self, tmp_path: Path) -> None:
        with store_in(tmp_path / "é☃$#&", on_cpu=True).use_compiler_cache() as use:
            assert use.active, use.reason

    def test_where_the_disk_is_nearly_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiler_cache, "LEAST_FREE_BYTES", 1 << 62)
        assert "MiB left" in self.reason(tmp_path)

    def test_where_the_folder_cannot_be_trusted(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.compiler_cache_dir.chmod(0o777)
        use = store.use_compiler_cache()
        assert not use.start().active
        assert "others can write" in use.reason

    def test_where_the_disk_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError("broken")

        monkeypatch.setattr(inductor_paths, "point_at", fail)
        assert "cannot be used: broken" in self.reason(tmp_path)


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_no_more_files_are_touched_once_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.cpp").write_text("int main;")
    touched: list[object] = []
    monkeypatch.setattr(os, "utime", lambda path, **_: touched.append(path))
    for seconds, files in ((0.0, 0), (60.0, 1)):
        monkeypatch.setattr(compiler_cache, "_MOST_ARMING_S", seconds)
        compiler_cache._arm(tmp_path, NOW, alone=True)
        assert len(touched) == files


def test_a_killed_process_is_no_longer_running(tmp_path: Path) -> None:
    began = NOW - 7200
    command = [sys.executable, "-c", HOLD, str(tmp_path / f"{began:.0f}-1-ab.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert running_since(tmp_path, NOW) == [began]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert running_since(tmp_path, began + 59) == [began], "a new mark may not be held yet"
    assert running_since(tmp_path, NOW) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("days", "content", "counts"),
    [(15, "pid=12 host=other", False), (13, "pid=12 host=other", True), (15, "", True)],
)
def test_a_mark_of_another_machine_on_a_disk_without_locks_counts_for_14_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, content: str, counts: bool
) -> None:
    monkeypatch.setattr(compiler_cache, "_is_held", lambda path: True)
    began = NOW - days * 86_400
    mark = tmp_path / f"{began:.0f}-12-ab.lock"
    mark.write_text(content)
    assert running_since(tmp_path, NOW) == ([began] if counts else [])
    assert mark.exists() is counts


@pytest.mark.parametrize(("kind", "named"), [(FileLock, False), (SoftFileLock, True)])
def test_only_a_lock_that_is_a_mere_file_names_its_owner(
    tmp_path: Path, kind: type[BaseFileLock], named: bool
) -> None:
    with kind(tmp_path / "a.lock"):
        assert bool((tmp_path / "a.lock").stat().st_size) is named


class TestTag:
    def test_another_processor_torch_or_number_of_threads_has_another_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = store_in(tmp_path).compiler_tag
        others = [store_in(tmp_path, machine=replace(MACHINE, **c)) for c in ({"cpu": "x"}, {"threads": 3})]
        assert len({own, *(s.compiler_tag for s in others)}) == 3
        assert store_in(tmp_path, machine=replace(MACHINE, cores=9)).compiler_tag == own
        monkeypatch.setattr("torch.__version__", "2.99")
        assert store_in(tmp_path).compiler_tag != own


class TestHalfALibrary:
    """What a killed compile has left: torch asks only whether the file is there, and fails to load it."""

    @pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
    @pytest.mark.parametrize(
        ("age", "others", "stays"),
        [(61, False, False), (59, False, True), (599, True, True), (601, True, False)],
    )
    def test_it_goes_once_nobody_can_be_writing_it(
        self, tmp_path: Path, age: float, others: bool, stays: bool
    ) -> None:
        store = store_in(tmp_path)
        folder = store.compiler_cache_dir
        half, whole, source = (folder / "ab" / name for name in ("half.so", "whole.so", "half.main.cpp"))
        half.parent.mkdir(parents=True)
        whole.write_bytes(Path(torch._C.__file__).read_bytes())
        half.write_bytes(whole.read_bytes()[:100])
        source.write_text("int main() {}")
        unfinished = half.with_name("half.so.12-34.part")
        unfinished.write_bytes(b"")
        for file in (whole, source):
            os.utime(file, (NOW - 1000, NOW - 1000))
        for file in (half, unfinished):
            os.utime(file, (NOW, NOW))
        with contextlib.ExitStack() as stack:
            if others:
                stack.enter_context(store_in(tmp_path).use_compiler_cache())
                os.environ.pop(FOLDER)  # that process has pointed itself there, not this one
            for file in (half, unfinished):
                os.utime(file, (NOW - age, NOW - age))
            stack.enter_context(store.use_compiler_cache())
            assert [half.exists(), unfinished.exists()] == [stays, stays]
        assert whole.exists()
        assert source.exists()
