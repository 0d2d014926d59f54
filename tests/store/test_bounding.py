"""What leaves the compiler's cache when it is too large, and what stays in any case."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.store import compiler_cache
from lightning_hotcompile.store.bounding import GRACE_S, Entry, entries_of, too_much
from tests.store.examples import NOW, store_in

HOUR = 3600.0


def put(path: Path, size: int = 100, age: float = 10 * HOUR) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - age, NOW - age))
    return path


def names(entries: list[Entry]) -> set[tuple[str, ...]]:
    return {tuple(p.name for p in entry.paths) for entry in entries}


def test_entries_are_what_inductor_needs_together(tmp_path: Path) -> None:
    put(tmp_path / "ab" / "cabx.cpp")
    put(tmp_path / "ab" / "cabx.so", 900, age=HOUR)
    put(tmp_path / "ab" / "caby.py")
    put(tmp_path / "fxgraph" / "cd" / "fcd1" / "one")
    put(tmp_path / "fxgraph" / "cd" / "fcd1" / "two")
    put(tmp_path / "fxgraph" / "cd" / "fcd2" / "one")
    put(tmp_path / "aotautograd" / "a1" / "one")
    put(tmp_path / "triton" / "0" / "K1" / "k.cubin")
    put(tmp_path / "precompiled_headers" / "h1.h")
    put(tmp_path / "precompiled_headers" / "h1.h.gch")
    put(tmp_path / "precompiled_headers" / "locks" / "h1.lock")
    put(tmp_path / "locks" / "cabx.lock")
    put(tmp_path / "ab" / ".123.tmp")
    put(tmp_path / "something_new" / "deep" / "file")
    put(tmp_path / "memoizer_cache.json")
    found = entries_of(tmp_path)
    assert names(found) == {
        ("cabx.cpp", "cabx.so"), ("caby.py",), ("fcd1",), ("fcd2",), ("a1",), ("K1",),
        ("h1.h", "h1.h.gch"), ("something_new",), ("memoizer_cache.json",),
    }  # fmt: skip
    one = next(e for e in found if e.paths[0].name == "cabx.cpp")
    assert (one.size, one.used, one.is_header) == (1000, NOW - HOUR, False)
    assert [e.paths[0].name for e in found if e.is_header] == ["h1.h"]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert entries_of(tmp_path / "missing") == []


def entry(name: str, used: float, size: int = 10, **fields: Any) -> Entry:
    return Entry(paths=(Path(name),), size=size, used=used, **fields)


@pytest.mark.parametrize(
    ("limit", "before", "gone"),
    [
        (30, 99, []),
        (29, 99, ["a"]),
        (10, 99, ["a", "b"]),
        (0, 99, ["a", "b", "c"]),
        (0, 2, ["a"]),
        (0, 1, []),
    ],
)
def test_the_least_recently_used_go_first(limit: int, before: float, gone: list[str]) -> None:
    entries = [entry("c", 3), entry("a", 1), entry("b", 2)]
    chosen = too_much(entries, max_bytes=limit, before=before)
    assert [e.paths[0].name for e in chosen] == gone


def test_headers_may_be_kept() -> None:
    entries = [entry("h", 1, 100, is_header=True), entry("a", 2), entry("b", 3)]
    assert names(too_much(entries, max_bytes=115, before=99, keep_headers=True)) == {("a",)}
    assert names(too_much(entries, max_bytes=115, before=99)) == {("h",)}


class TestStore:
    def test_is_bounded_over_all_machines_and_versions(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        own = store.compiler_cache_dir
        old = put(own.parent / ("0" * 16) / "ab" / "cold.so", age=9 * HOUR)
        young = put(own / "ab" / "cyoung.so", age=2 * HOUR)
        assert store.bound(200) == 0
        assert store.bound(100) == 100
        assert (old.exists(), young.exists()) == (False, True)
        assert list((store.folder / "tmp").iterdir()) == []

    def test_what_was_read_lately_counts_as_used(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        read = put(store.compiler_cache_dir / "ab" / "ca.so", age=9 * HOUR)
        os.utime(read, (NOW - 2 * HOUR, NOW - 9 * HOUR))
        other = put(store.compiler_cache_dir / "ab" / "cb.so", age=8 * HOUR)
        assert store.bound(100) == 100
        assert (read.exists(), other.exists()) == (True, False)

    def test_nothing_of_the_last_hour_goes(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        put(store.compiler_cache_dir / "ab" / "ca.so", age=GRACE_S - 1)
        assert store.bound(0) == 0
        put(store.compiler_cache_dir / "ab" / "ca.so", age=GRACE_S + 1)
        assert store.bound(0) == 100

    @pytest.mark.parametrize(("age", "stays"), [(25 * HOUR, False), (23 * HOUR, True)])
    def test_what_a_killed_run_has_left_of_its_child_goes_after_a_day(
        self, tmp_path: Path, age: float, stays: bool
    ) -> None:
        store = store_in(tmp_path)
        left = put(store.compiler_cache_dir / "prewarm-abc" / "blocks.graph", age=age).parent
        os.utime(left, (NOW - age, NOW - age))
        assert store.bound(1000) == 0
        assert left.exists() is stays

    def test_links_are_removed_and_not_followed(self, tmp_path: Path) -> None:
        store = store_in(tmp_path)
        outside = put(tmp_path / "outside" / "file")
        link = store.compiler_cache_dir / "fxgraph" / "ab" / "entry"
        link.parent.mkdir(parents=True)
        link.symlink_to(outside.parent)
        store.clear()
        assert (link.is_symlink(), outside.exists()) == (False, True)

    def test_what_a_run_that_is_under_way_may_use_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler_cache, "why_not", lambda folder: None)
        running = store_in(tmp_path, now=lambda: NOW - 5 * HOUR).use_compiler_cache()
        store = store_in(tmp_path)
        cache = store.compiler_cache_dir
        header = put(cache / "precompiled_headers" / "h.h.gch", age=9 * HOUR)
        unused = put(cache / "ab" / "cold.so", age=9 * HOUR)
        used = put(cache / "ab" / "cused.so", age=4 * HOUR)
        with running:
            for path in (header, unused, used):  # start() has marked the headers as used
                os.utime(path, (path.stat().st_mtime,) * 2)
            store.bound(0)
            assert (header.exists(), unused.exists(), used.exists()) == (True, False, True)
            assert store.clear() == 0
        assert store.clear() == 200
        assert not header.exists()
        assert not used.exists()

    def test_without_access_times_nothing_goes_under_a_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler_cache, "why_not", lambda folder: None)
        monkeypatch.setattr(compiler_cache, "keeps_access_times", lambda folder: False)
        store = store_in(tmp_path)
        put(store.compiler_cache_dir / "ab" / "cold.so")
        with store_in(tmp_path).use_compiler_cache():
            assert store.bound(0) == 0
        assert store.bound(0) == 100
