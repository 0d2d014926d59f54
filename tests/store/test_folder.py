"""The folder: whom it trusts, what it leaves behind."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.store import folder as folder_module
from lightning_hotcompile.store.folder import (
    SafeFolder,
    StoreBusy,
    StoreError,
    default_folder,
    open_regular,
    read_file,
)
from lightning_hotcompile.store.store import Store, open_store
from tests.store.examples import key, path_of, profile, store_in


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestDefault:
    def test_is_the_users_place_for_caches(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("HOTCOMPILE_STORE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found = default_folder()
        assert found == platformdirs.user_cache_path("lightning-hotcompile", appauthor=False)
        assert found.name == "lightning-hotcompile"

    def test_the_variable_goes_first(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "mine"))
        assert Store().folder == tmp_path / "mine"

    def test_a_tilde_in_it_is_the_home_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("HOTCOMPILE_STORE", "~/mine")
        assert default_folder() == tmp_path / "mine"

    def test_a_user_without_a_home_gets_an_error_and_no_folder_called_tilde(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", " ")
        monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~nobody-at-all/x"))
        with pytest.raises(StoreError, match="set HOTCOMPILE_STORE"):
            default_folder()


class TestCreated:
    def test_with_all_rooms_for_this_user_alone(self, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            store = store_in(tmp_path / "not" / "there")
            store.remember(profile())
            cache = store.compiler_cache_dir
        finally:
            os.umask(old)
        for path in (store.folder, store.folder / "profiles", store.folder / "tmp", cache, cache.parent):
            assert mode_of(path) == 0o700, path
        assert mode_of(path_of(store, key())) & 0o077 == 0

    def test_an_existing_one_is_taken_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir(mode=0o755)
        assert store_in(tmp_path).remember(profile())
        assert mode_of(tmp_path / "store") == 0o755


def writable_by_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def writable_by_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def a_dead_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def a_file(path: Path) -> None:
    path.write_text("x")


def a_room_that_is_a_link(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path.parent / "elsewhere").mkdir(mode=0o700)
    (path / "profiles").symlink_to(path.parent / "elsewhere")


def a_room_writable_by_all(path: Path) -> None:
    path.mkdir(mode=0o700)
    writable_by_all(path / "profiles")


def in_a_folder_where_all_can_write(path: Path) -> None:
    path.mkdir(mode=0o700)
    path.parent.chmod(0o777)


REFUSED = {
    writable_by_all: r"others can write to it \(mode 0777\): run chmod 700",
    writable_by_group: r"mode 0770",
    a_link: "symbolic link to .*elsewhere",
    a_dead_link: "symbolic link",
    a_file: "not a folder",
    a_room_that_is_a_link: "profiles.*symbolic link",
    a_room_writable_by_all: "profiles.*others can write",
    in_a_folder_where_all_can_write: "others can replace it",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_a_folder_that_cannot_be_trusted_is_refused(make: Any, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    make(parent / "store")
    with pytest.raises(StoreError, match=REFUSED[make]):
        store_in(parent)
    with pytest.warns(HotCompileWarning, match="This run remembers nothing"):
        assert open_store(parent / "store") is None


def test_a_sticky_folder_such_as_tmp_is_no_danger(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o1777)
    assert store_in(parent).remember(profile())


def test_the_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=f"belongs to user {owner}, not to this user"):
        store_in(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folders")
def test_a_place_where_no_folder_can_be_made_is_refused() -> None:
    with pytest.raises(StoreError, match=r"cannot be made|is not used"):
        Store(Path("/proc/hotcompile/store"))


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Not a directory"):
        Store(tmp_path / "file" / "store")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be"):
        store_in(tmp_path)


def test_a_read_only_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_in(tmp_path)
    monkeypatch.setattr(folder_module.os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(StoreError, match="read-only disk"):
        store_in(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_fails_later_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = store_in(tmp_path)

    def fail(*_: Any, **__: Any) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.warns(HotCompileWarning, match=f"could not keep a profile: .*{os.strerror(number)}"):
        assert store.remember(profile()) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.remember(profile()) is False
        assert store.find(key()) is None


class TestSetting:
    def test_none_is_no_store(self) -> None:
        assert open_store(None) is None

    def test_auto_is_the_default(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "mine"))
        store = open_store("auto")
        assert store is not None
        assert store.folder == tmp_path / "mine"

    def test_a_folder_is_that_folder(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path / "mine"))
        assert store is not None
        assert store.folder == tmp_path / "mine"


class TestReading:
    @pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
    def test_only_plain_files(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "file"
        (tmp_path / "other").write_text("x")
        make = {"link": lambda: path.symlink_to(tmp_path / "other"), "folder": path.mkdir}
        make.get(kind, lambda: os.mkfifo(path))()
        with pytest.raises(OSError, match=r"no regular file|symbolic link|links"):
            open_regular(path)

    def test_only_so_much(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"12345")
        assert read_file(tmp_path / "file", 5) == b"12345"
        with pytest.raises(OSError, match="more than 4 bytes"):
            read_file(tmp_path / "file", 4)


class TestWriting:
    def test_replaces_as_a_whole_and_leaves_nothing_behind(self, tmp_path: Path) -> None:
        folder = SafeFolder(tmp_path / "store")
        path = folder.path / "file"
        folder.write(path, b"old")
        folder.write(path, b"new")
        assert path.read_bytes() == b"new"
        assert list((folder.path / "tmp").iterdir()) == []

    def test_a_failure_leaves_the_old_content(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = SafeFolder(tmp_path / "store")
        path = folder.path / "file"
        folder.write(path, b"old")
        monkeypatch.setattr(folder_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            folder.write(path, b"new")
        assert path.read_bytes() == b"old"
        assert list((folder.path / "tmp").iterdir()) == []

    def test_what_a_killed_writer_left_is_removed_when_it_is_old(self, tmp_path: Path) -> None:
        folder = SafeFolder(tmp_path / "store")
        for name, when in (("old", 100), ("young", 300)):
            (folder.path / "tmp" / name).mkdir()
            (folder.path / "tmp" / name / "file").write_text("half")
            os.utime(folder.path / "tmp" / name, (when, when))
        (folder.path / "tmp" / "link").symlink_to(tmp_path)
        folder.sweep(before=200)
        assert {p.name for p in (folder.path / "tmp").iterdir()} == {"young", "link"}

    def test_two_do_not_hold_one_lock(self, tmp_path: Path) -> None:
        one, other = (SafeFolder(tmp_path / "store", lock_timeout=0) for _ in range(2))
        with one.locked("a"):
            with other.locked("b"):
                pass
            with pytest.raises(StoreBusy, match="locked"), other.locked("a"):
                pass
        with other.locked("a"):
            pass
