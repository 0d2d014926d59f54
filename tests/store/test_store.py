"""What a run keeps and what the next one finds."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.store import records, samples
from lightning_hotcompile.store import store as store_module
from lightning_hotcompile.store.folder import StoreBusy, StoreError
from tests.store.examples import LATER, MACHINE, NOW, key, path_of, profile, sample, store_in, unmeasured
from tests.store.test_profiles import BROKEN

HOLD_THE_LOCK = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


class TestProfiles:
    def test_a_second_run_finds_what_the_first_has_kept(self, tmp_path: Path) -> None:
        assert store_in(tmp_path).find(key()) is None
        assert store_in(tmp_path).remember(profile()) is True
        assert store_in(tmp_path).find(key()) == profile()

    def test_other_keys_find_nothing(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.remember(profile())
        assert store.find(key(torch="2.14.0")) is None

    def test_a_second_one_is_merged(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.remember(profile())
        store.remember(unmeasured(when=LATER, warm_compile_s=2.0))
        found = store.find(key())
        assert found is not None
        assert (found.verdict, found.runs, found.compile_s, found.warm_compile_s) == ("good", 2, 20.5, 2.0)

    def test_a_time_far_in_the_future_does_not_win(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.remember(profile(verdict="bad", when="2099-01-01T00:00:00+00:00"))
        store.remember(profile(verdict="good"))
        found = store.find(key())
        assert found is not None
        assert found.verdict == "good"

    def test_the_key_of_here_and_now(self, tmp_path: Path) -> None:
        here = store_in(tmp_path).key(plan="p", signature="s")
        assert (here.plan, here.signature, here.machine) == ("p", "s", MACHINE)
        assert here.torch == torch.__version__
        assert here.package

    def test_the_machine_is_looked_at_when_it_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[int] = []
        monkeypatch.setattr(store_module.Machine, "here", lambda on_cpu: looks.append(1) or MACHINE)
        store = store_in(tmp_path, machine=None)
        store.remember(profile())
        assert store.find(key()) is not None
        assert looks == []
        assert store.machine is store.machine is MACHINE
        assert looks == [1]

    def test_only_so_many_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "MOST_PROFILES", 3)
        store = store_in(tmp_path)
        for number in range(5):
            store.remember(profile(f"p{number}"))
            os.utime(path_of(store, key(f"p{number}")), (number, number))
        kept = [n for n in range(5) if store.find(key(f"p{n}"))]
        assert kept == [2, 3, 4]


class TestDamage:
    @pytest.mark.parametrize("name", BROKEN)
    def test_is_told_once_ignored_and_written_anew(self, tmp_path: Path, name: str) -> None:
        store = store_in(tmp_path)
        path = path_of(store, key())
        path.write_bytes(BROKEN[name])
        with pytest.warns(HotCompileWarning, match=f"{path.name} is not used and will be written anew"):
            assert store.find(key()) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.find(key()) is None
            assert store.remember(profile()) is True
        assert store_in(tmp_path).find(key()) == profile()

    @pytest.mark.parametrize("kind", ["huge", "pipe", "link", "the profile of another key"])
    def test_of_other_kinds(self, tmp_path: Path, kind: str) -> None:
        store = store_in(tmp_path)
        path = path_of(store, key())
        if kind == "huge":
            path.write_bytes(profile().to_bytes() + b" " * 70_000)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            (tmp_path / "real").write_bytes(profile().to_bytes())
            path.symlink_to(tmp_path / "real")
        else:
            path.write_bytes(profile("p2").to_bytes())
        with pytest.warns(HotCompileWarning, match="is not used"):
            assert store.find(key()) is None
        assert store.remember(profile()) is True
        assert store_in(tmp_path).find(key()) == profile()

    def test_a_folder_in_its_place_is_no_crash(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        path_of(store, key()).mkdir()
        with pytest.warns(HotCompileWarning) as told:
            assert store.remember(profile()) is False
        assert "no regular file" in str(told[0].message)
        assert "could not keep a profile" in str(told[1].message)

    def test_what_a_newer_version_wrote_is_told_and_left_alone(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        path = path_of(store, key())
        newer = profile().to_bytes().replace(b'"format": 2', b'"format": 3')
        path.write_bytes(newer)
        with pytest.warns(HotCompileWarning, match=r"is not used: it has format 3"):
            assert store.find(key()) is None
        assert store.remember(profile()) is False
        assert path.read_bytes() == newer

    def test_foreign_files_beside_them_do_not_matter(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.remember(profile())
        (store.folder / "profiles" / "notes.txt").write_text("mine")
        (store.folder / "profiles" / "x.json").write_text("{}")
        assert store.find(key()) == profile()
        store.clear()
        assert (store.folder / "profiles" / "notes.txt").exists()

    def test_a_store_that_vanishes_is_no_crash(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.folder.rename(tmp_path / "away")
        assert store.find(key()) is None
        assert store.compile_samples() == ()
        with pytest.warns(HotCompileWarning, match="is gone"):
            assert store.remember(profile()) is False
        with pytest.warns(HotCompileWarning, match="is gone"):
            assert store.bound() == 0
        assert not store.folder.exists()


class TestLock:
    def test_one_that_another_process_holds_does_not_stop_a_training(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = store_in(tmp_path, lock_timeout=0.01)
        command = [sys.executable, "-c", HOLD_THE_LOCK, str(store.folder / "records.lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with caplog.at_level("DEBUG", logger="lightning_hotcompile"), warnings.catch_warnings():
                warnings.simplefilter("error")
                assert store.remember(profile()) is False
                assert store.add_compile_sample(sample()) is False
                assert store.find(key()) is None
            with pytest.raises(StoreBusy, match="is locked"):
                store.clear()
            holder.communicate()
        assert "profile not kept" in caplog.text
        assert store.remember(profile()) is True

    @pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError()])
    def test_a_disk_without_locks_is_told_once_and_asked_no_more(
        self, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, asked = store_in(tmp_path), []

        def acquire(lock: FileLock, **_: object) -> None:
            asked.append(lock)
            raise error

        monkeypatch.setattr(FileLock, "acquire", acquire)
        with pytest.warns(HotCompileWarning, match="cannot be locked") as told:
            kept = [store.remember(profile()), store.add_compile_sample(sample()), store.bound()]
        assert kept == [False, False, 0]
        assert len(told) == 1
        assert len(asked) == 2, "the store's, and one that nobody can hold"
        assert store.find(key()) is None
        with pytest.raises(StoreError, match="no locks"):
            store.clear()


class TestKilledWriter:
    def test_what_it_left_is_harmless_and_cleaned(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.remember(profile())
        half = store.folder / "tmp" / "tmpabc"
        half.mkdir()
        (half / "file").write_bytes(profile().to_bytes()[:50])
        os.utime(half, (NOW - 7200, NOW - 7200))
        assert store.find(key()) == profile()
        assert store.remember(profile("p2")) is True
        assert list((store.folder / "tmp").iterdir()) == []
        assert [row.kind for row in store.ls()] == ["profile", "profile"]


class TestSamples:
    def test_are_kept_by_machine_each_once_and_in_order(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        assert store.add_compile_sample(sample(3.0, by_child=True, when=LATER)) is True
        assert store.add_compile_sample(sample(20.0), sample(3.0, by_child=True, when=LATER)) is True
        assert store_in(tmp_path).compile_samples() == (sample(20.0), sample(3.0, by_child=True, when=LATER))

    def test_the_oldest_go(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        store.add_compile_sample(sample(1.0))
        store.add_compile_sample(*(sample(2.0 + i, when=LATER) for i in range(samples.MOST_SAMPLES)))
        assert len(store.compile_samples()) == samples.MOST_SAMPLES
        assert sample(1.0) not in store.compile_samples()

    @pytest.mark.parametrize("content", [b"", b"{}", b"\x80", profile().to_bytes()])
    def test_damage_is_told_and_written_anew(self, tmp_path: Path, content: bytes) -> None:
        store = store_in(tmp_path)
        (store.folder / "samples" / f"{MACHINE.digest}.json").write_bytes(content)
        with pytest.warns(HotCompileWarning, match="written anew"):
            assert store.compile_samples() == ()
        assert store.add_compile_sample(sample()) is True
        assert store.compile_samples() == (sample(),)


class TestListAndClear:
    def fill(self, tmp_path: Path) -> Any:
        store = store_in(tmp_path)
        store.remember(profile())
        store.remember(unmeasured("p2"))
        store.add_compile_sample(sample())
        (store.compiler_cache_dir / "ab").mkdir()
        (store.compiler_cache_dir / "ab" / "cab.so").write_bytes(b"12345")
        for path in store.folder.rglob("*.*"):
            os.utime(path, (NOW - 100, NOW - 100))
        return store

    def test_rows(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path)
        path_of(store, key("p2")).write_text("{")
        rows = {row.name: row for row in store.ls()}
        one = rows[key().digest]
        when = datetime.fromtimestamp(NOW - 100, timezone.utc)
        assert one.text == "good, 1.30x, scope step, 1 run, 2026-01-31T12:00:00+00:00"
        assert (one.kind, datetime.fromtimestamp(one.used, timezone.utc)) == ("profile", when)
        assert rows[key("p2").digest].text.startswith("not readable: it cannot be read as JSON")
        assert rows[MACHINE.digest].text == "1 compile costs"
        cache = rows[store.compiler_tag]
        assert (cache.kind, cache.size) == ("compiler", 5)
        assert cache.text == "1 entries of this machine and PyTorch"

    def test_clear_forgets_all(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path)
        size = sum(row.size for row in store.ls())
        assert store.clear() == size > 5
        assert [row.size for row in store.ls()] == [0]
        assert store.find(key()) is None

    def test_what_a_run_asks_for_is_used(self, tmp_path: Path) -> None:
        """A verdict against compiling is read by each run, and written by one."""
        store = store_in(tmp_path)
        store.remember(profile())
        store.add_compile_sample(sample())
        for path in (path_of(store, key()), *(tmp_path / "samples").glob("*.json")):
            os.utime(path, (NOW - 100, NOW - 100))
        assert store.find(key()) is not None
        assert len(store.compile_samples()) == 1
        assert store.clear(older_than=50) == 0
        assert store.find(key()) == profile()

    def test_clear_of_what_is_old(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path)
        os.utime(path_of(store, key()), (NOW, NOW))
        assert store.clear(older_than=101) == 0
        assert store.clear(older_than=50) > 5
        assert [row.kind for row in store.ls()] == ["profile", "compiler"]
        assert store.find(key()) is not None

    def test_a_store_that_cannot_be_read_is_an_error(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path)
        store.folder.rename(tmp_path / "away")
        with pytest.raises(StoreError):
            store.ls()
        with pytest.raises(StoreError):
            store.clear()


def test_nothing_here_can_unpickle() -> None:
    room = Path(store_module.__file__).parent
    words = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {a.name.partition(".")[0] for a in node.names} & words, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in words, path
            elif isinstance(node, ast.Attribute):
                assert (ast.unparse(node.value), node.attr) != ("torch", "load"), path
            elif isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec", "__import__"}, path
